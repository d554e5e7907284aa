"""By which statistics batch normalisation normalises: the source's, the batch's, or a blend; part
of the predictive model.

A blend with share α of the batch has the moments of the mixture:

    mean = (1 - α) m + α m_b,   variance = (1 - α) v + α v_b + α (1 - α) (m_b - m)²

with the batch's variance v_b the biased one, by which torch normalises. The blend of
``PseudoCount`` is differentiated as it stands. That of ``Ema`` has the derivative of batch
renormalisation (Ioffe, 2017): with σ² = variance + ε, σ_b² = v_b + ε,

    (x - mean) / σ = (x - m_b) / σ_b · r + d,   r = σ_b / σ,  d = (m_b - mean) / σ

where m_b and σ_b are differentiated as in batch normalisation, r and d are not. In the exact
derivative the batch's moments have the share α only, so that a step may move the mean and scale of
all samples together, and adaptation was seen to collapse. Predictions ask how the logits move with
the parameters, and have the exact derivative (``Network.exact``, ``Network.pushforward``).
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from driftfilter.base.checks import (
    LATE,
    Checked,
    Fraction,
    NotNegative,
    register,
    require,
    require_finite,
    require_shape,
)
from driftfilter.base.sharding import Shards, gather_samples
from driftfilter.model.label_runs import trust_in_shares
from driftfilter.networks.batch_trust import Probe, Witness, mean_shift, moment_shift
from driftfilter.networks.norm_rules import NormCall, NormRule
from driftfilter.networks.renormalized import fits_cpu, renormalize_on_cpu
from driftfilter.networks.triton_batch_norm import Renormalized, SampleSums, blend, fits

_ENOUGH = 64  # samples whose statistics count in full
_FAR = 10.0  # deviations from the carried mean at which a value of a table is cut off
# Buffers of a layer with what enters it from source data: mean and variance [c], samples [].
SEEN = ("seen_mean", "seen_variance", "seen_samples")


class Moments(NamedTuple):
    """By which a layer normalised."""

    mean: Tensor  # [c], or [n, c] if each sample has its own
    scale: Tensor  # the same, 1 / standard deviation
    # Sums of the gradient to come, if the layer's own backward pass needs them too.
    sums: SampleSums | None = None


@final
@dataclass(frozen=True)
class PseudoCount(Checked):
    """The source's statistics count as ``count`` samples: a blend with share α = n / (count + n) of
    a batch of n.

    The posterior mean of the moments under a normal-inverse-gamma prior of that many observations.
    """

    count: NotNegative = 16.0

    def share(self, samples: int) -> float:
        """α."""
        return samples / (self.count + samples)


@final
@dataclass(frozen=True)
class Ema(Checked):
    """Carried statistics, the source's at first; each step blends them with the batch's, and
    normalises by and carries on the blend. The share of the batch is

        α_t = max(momentum · min(1, n/64) · D_{t-1}^diversity, G_t · min(1, n/16)),
        D = exp(H(p̄)) / (k (1 - (1 - 1/k)ⁿ)), at most 1

    D compares the effective number of classes in the mean prediction p̄ of the last batch observed
    with the number that n balanced draws from k classes show; it is 1 at first. A batch of few
    classes (labels that come in runs) or of few samples says little about the statistics of a
    domain. A batch's own D is known only once it is normalised. What is carried on knows it: there
    (D_{t-1} D_t)^(diversity/2) takes the place of D_{t-1}^diversity, so that the first batch of a
    run leaves little behind.

    Early layers see the domain, late ones the classes. If it is known how often a label of the
    stream is that of the sample before (R, from ``LabelChain``), D^((1 - R) diversity) is in the
    place of D^diversity in the first 45 % of the layers: few classes in a batch are then what is to
    be expected, and no reason to distrust it. In all others the share is multiplied by ``late``
    and by t(R) (label_runs.py), which is 0 if a label stays for ever. So are the weights of
    samples, by t(R), if there is a ``shift``.

    A network that a change of domain has broken predicts few classes too, and must not shut itself
    out. G (0 to 1) is 1 if the moments at the first batch norm have moved farther than a change of
    classes moves them (batch_trust.py): the batch's statistics then take the place of the carried
    ones. In tables, whose layers see one value a sample, only a mean that is far off tells; and
    what is blended there are values within 10 deviations of the carried mean, so that one broken
    row does not rescale all that follow.

    ``diversity`` 0: every batch has the share ``momentum``, and nothing of the above holds but
    ``late``. That is not yet the published BN-EMA, which is ``RunningStatistics``: there a layer's
    batch moments come from a pass in which all layers before it normalise by the batch, while here
    they are of what the layer then normalises. So the statistics there fit inputs that no layer but
    the first ever sees.

    ``shift`` > 0: while the stream is of the source's domain its statistics are the source's, and
    no batch teaches anything. What is blended are the batch's moments with share ν and the source's
    with share 1 - ν,

        ν = max(2 (S / shift - 1), G), between 0 and 1,

    S the shift that the source network, with its own statistics, sees in every fourth batch
    (batch_trust.py). The weights of samples are multiplied by the first term, which holds back
    rules that see their size (``Linearized``, SGD), not Adam. Not in tables. ``baseline``: S is
    how far a batch is from the "running" statistics, or from the moments of source "data" in the
    same network. Running statistics are those of training, of augmented images under weights that
    still moved: a network's own clean images may have S = 0.34 there, and 0.00 by its data.

    ``doubt`` u₀ > 0: a stream is of another domain, too, if the source is unsure of it, whatever
    its moments. S is then at least shift · u / u₀, u the source's mean 1 - max p in the batch
    (``batch_trust.doubt_of``). Spots and the blocks of JPEG hardly change the moments, and cost a
    source up to a fourth of its accuracy.
    """

    momentum: Fraction = 0.1
    diversity: NotNegative = 0.0
    shift: NotNegative = 0.0
    late: Fraction = field(default=1.0, metadata=LATE)
    baseline: Literal["running", "data"] = field(default="running", metadata=LATE)
    doubt: Fraction = field(default=0.0, metadata=LATE)

    def trust(self, found: Tensor, stay: Tensor | float) -> Tensor:
        """By what the share of a batch with classes of diversity D is multiplied [2], in early
        layers and in late ones, if a label of the stream stays with this probability.
        """
        late = self.late * trust_in_shares(stay) * found**self.diversity
        return torch.stack((found ** (self.diversity * (1 - stay)), late))

    def share(self, samples: int) -> float:
        """α at D = 1 and G = 0."""
        return self.momentum * min(1.0, samples / _ENOUGH) if self.diversity > 0 else self.momentum


@final
@dataclass(frozen=True)
class RunningStatistics(Checked):
    """The published BN-EMA: running statistics as torch keeps them in training, from the source's
    on; normalised by as in evaluation.

        m ← (1 - momentum) m + momentum m_b,   v ← (1 - momentum) v + momentum v_b N / (N - 1)

    Two passes a batch. In the first each layer normalises by its batch, and its m_b and v_b, of N
    values a channel, enter the running statistics; the second normalises by these, which no
    derivative sees. ``Ema`` takes one pass: its layers blend the moments of what they normalise,
    with the biased variance and the spread between the two means. A layer that sees one value a
    channel leaves its statistics.
    """

    momentum: Fraction = 0.1

    def share(self, samples: int) -> float:
        """The share of a batch of n samples."""
        return self.momentum


Statistics: TypeAlias = (
    Literal["batch", "source"] | PseudoCount | Ema | RunningStatistics | NormRule
)


def require_statistics(statistics: Any) -> None:
    """Raise for anything but statistics."""
    is_rule = isinstance(statistics, NormRule) and not isinstance(statistics, type)
    require(
        is_rule
        or isinstance(statistics, (PseudoCount, Ema, RunningStatistics))
        or statistics in ("batch", "source"),
        "Network: statistics",
        statistics,
        "'batch', 'source', PseudoCount(count), Ema(momentum), RunningStatistics(momentum) or a "
        "NormRule",
    )


def diversity(logits: Tensor) -> Tensor:
    """D of a batch's logits [n, k], a scalar []: 1 if as many classes are predicted as n
    balanced draws would show.
    """
    n, k = logits.shape
    entropy = torch.special.entr(logits.softmax(-1).mean(0)).sum()
    share: Tensor = entropy.exp() / (k * -math.expm1(n * math.log1p(-1 / k)) if k > 1 else 1)
    return share.clamp(max=1)


class TwinBatchNorm(_BatchNorm):
    """A batch norm of a twin that keeps the moments by which it last normalised, for whoever wants
    rows or carries them.
    """

    # None: the batch's statistics
    blend: PseudoCount | Ema | RunningStatistics | NormRule | None
    measures: bool = False  # RunningStatistics: whether this is the first pass over a batch
    rule: NormRule | None = None  # the blend, if it is a rule of one's own
    learning: bool = False  # whether a pass is one that learns, for such a rule
    trust: Tensor | float  # D^diversity, by which the share of the batch is multiplied
    novelty: Tensor | float = 1.0  # ν, the share of the batch in what is blended; else the source
    exact: bool = False  # whether Ema's blend, too, is differentiated as it stands
    settled: bool = False  # whether what is carried is normalised by as it is
    witness: Witness | None = None  # of a change of domain, if the blend asks for diversity
    probe: Probe | None = None  # who asks how far the batch is from the source
    carried: (
        tuple[Tensor, Tensor] | None
    )  # mean and variance [c]; None: the running ones, if there are any
    moments: Moments  # of the last call
    blended: tuple[Tensor, Tensor]  # mean and variance [c] of the last call
    believed: "Believed | None"  # what it blended

    together: "Together | None" = None  # all layers that blend, with this one
    shards: Shards | None = None  # of the batch at hand, if other ranks have a part of it

    own_check: Callable[[Any, Tensor], None]  # of the dimensions of its inputs, by the class it was

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, inputs: Tensor) -> Tensor:
        self.own_check(self, inputs)
        if self.probe is not None:
            return self._tell(inputs, self.probe)
        still = self.settled and self.blend is not None
        if still or isinstance(self.blend, RunningStatistics):
            return self._measure(inputs) if self.measures else self._by_running(inputs)
        if self.rule is not None:
            return self._by_rule(inputs, self.rule)
        if self.shards is not None:
            return self._among(inputs, self.shards)
        if self.carried is None or (self.blend is None and inputs.numel() > self.num_features):
            return self._by_batch(inputs)
        return self._by_source(inputs) if self.blend is None else self._by_blend(inputs)

    def _by_batch(self, inputs: Tensor) -> Tensor:
        outputs, mean, scale = self._normalize_fused(inputs, self.weight, self.bias)
        self.__dict__["moments"] = Moments(
            mean.detach(), scale.detach()
        )  # a module's own __setattr__ takes as long as a kernel
        return outputs

    def _normalize_fused(
        self, inputs: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """F.batch_norm itself, for every backend, with the statistics that it works out and
        drops.
        """
        outputs, mean, scale, *_ = torch._batch_norm_impl_index(
            inputs, weight, bias, None, None, True, 0.0, self.eps, torch.backends.cudnn.enabled
        )
        return outputs, mean, scale

    def _by_source(self, inputs: Tensor) -> Tensor:
        """For a batch with one value a channel, which has no variance."""
        assert self.carried is not None
        mean, variance = self.carried
        self.moments = Moments(mean, (variance + self.eps).rsqrt())
        return functional.batch_norm(
            inputs, mean, variance, self.weight, self.bias, False, 0.0, self.eps
        )

    def _by_running(self, inputs: Tensor) -> Tensor:
        """Normalise by the running statistics, which are constants."""
        assert self.carried is not None
        mean, variance = self.carried
        scale = (variance + self.eps).rsqrt()
        self.moments = Moments(mean, scale)
        return _scale_and_shift(inputs, mean, scale, self.weight, self.bias)

    def _measure(self, inputs: Tensor) -> Tensor:
        """Normalise by the batch, whose moments enter the running statistics."""
        assert isinstance(self.blend, RunningStatistics)
        assert self.carried is not None
        values, samples = inputs.numel() // self.num_features, len(inputs)
        mean, variance = self._batch(inputs)
        if self.shards is not None:
            mean, variance, values, samples = self.shards.moments(mean, variance, values, samples)
        if values == 1:
            return self._by_running(inputs)
        share, unbiased = self.blend.share(samples), variance * (values / (values - 1))
        self.carried = self.blended = (
            torch.lerp(self.carried[0].to(mean), mean, share),
            torch.lerp(self.carried[1].to(mean), unbiased, share),
        )
        return _scale_and_shift(inputs, mean, (variance + self.eps).rsqrt(), self.weight, self.bias)

    def _by_rule(self, inputs: Tensor, rule: NormRule) -> Tensor:
        """Normalise by a rule of one's own."""
        assert self.carried is not None
        call = NormCall(inputs, self.carried, self.learning, self.eps)
        (mean, variance), (next_mean, next_variance) = rule.normalize_by(call)
        for name, part in (("mean", next_mean), ("variance", next_variance)):
            what = f"the {name} that {rule} carries on"
            require_shape(what, part, f"[{self.num_features}]", self.num_features)
            require_finite(what, part)
        scale = (variance + self.eps).rsqrt()
        self.moments = Moments(mean.detach(), scale.detach())
        self.blended = (next_mean.detach(), next_variance.detach())
        return _scale_and_shift(inputs, mean, scale, self.weight, self.bias)

    def _tell(self, inputs: Tensor, probe: Probe) -> Tensor:
        """Normalise by the source's statistics, and tell how far the batch is from the source."""
        if inputs.numel() > len(inputs) * self.num_features:
            mean, variance = self._batch_by_kernel(inputs)
            if self.shards is not None:
                values, samples = inputs.numel() // self.num_features, len(inputs)
                mean, variance = self.shards.moments(mean, variance, values, samples)[:2]
            known, known_variance = (part.to(mean) for part in self._baseline(probe))
            means = gather_samples(inputs.flatten(2).mean(2, dtype=mean.dtype))
            probe.hear((known, known_variance + self.eps), (mean, variance + self.eps), means)
        return functional.batch_norm(
            inputs, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )

    def _baseline(self, probe: Probe) -> tuple[Tensor, Tensor]:
        """Mean and variance [c] from which a batch is how far away: of source data, if they are
        known, else the running ones.
        """
        asked = isinstance(self.blend, Ema) and self.blend.baseline == "data"
        if asked and SEEN[0] in self._buffers:
            mean, variance, probe.reference = (getattr(self, name) for name in SEEN)
            return mean, variance
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    def _by_blend(self, inputs: Tensor) -> Tensor:
        fixed = self._renormalizes(inputs.numel() // self.num_features)
        if fixed and self._fits_kernels(inputs) and not self._is_bounded(inputs):
            return self._renormalize_by_kernel(inputs)
        batch = self._batch_by_kernel(inputs.detach()) if fixed else self._batch(inputs)
        self._ask(inputs, batch, len(inputs))
        believed = batch
        if self._is_bounded(inputs):
            believed = self._believe(self._batch(self._bound(inputs)), batch)
        mean, variance = self._blend(believed, len(inputs))
        scale = (variance + self.eps).rsqrt()
        self.__dict__.update(
            moments=Moments(mean.detach(), scale.detach()),
            blended=(mean.detach(), variance.detach()),
        )  # a module's own __setattr__ takes as long as a kernel
        return (
            self._renormalize(inputs, batch, self.moments)
            if fixed
            else _scale_and_shift(inputs, mean, scale, self.weight, self.bias)
        )

    def _renormalizes(self, values: int) -> bool:
        """Whether a batch with so many values a channel has the derivative of renormalisation."""
        return isinstance(self.blend, Ema) and values > 1 and not self.exact

    def _among(self, inputs: Tensor, shards: Shards) -> Tensor:
        """Normalise if other ranks have a part of the batch: its moments are those of all its
        parts.
        """
        own = (*self._batch(inputs), inputs.numel() // self.num_features, len(inputs))
        batch_mean, batch_variance, values, samples = shards.moments(*own)
        if self.carried is not None and self.blend is None and values == 1:
            return self._by_source(inputs)
        mean, variance = batch_mean, batch_variance
        if self.blend is not None:
            self._ask(inputs, (mean, variance), samples)
            if self._is_bounded(inputs):
                own = (*self._batch(self._bound(inputs)), *own[2:])
                bounded = shards.moments(*own)[:2]
                mean, variance = self._believe(bounded, (mean, variance))
            mean, variance = self._blend((mean, variance), samples)
            self.blended = (mean.detach(), variance.detach())
        scale = (variance + self.eps).rsqrt()
        self.moments = Moments(mean.detach(), scale.detach())
        if not self._renormalizes(values):
            return _scale_and_shift(inputs, mean, scale, self.weight, self.bias)
        corrected = self._correct((batch_mean.detach(), batch_variance.detach()), self.moments)
        return _scale_and_shift(inputs, batch_mean, (batch_variance + self.eps).rsqrt(), *corrected)

    def _renormalize(
        self, inputs: Tensor, batch: tuple[Tensor, Tensor], moments: Moments
    ) -> Tensor:
        """Renormalise by batch normalisation with another scale and shift: see the top of this
        file.
        """
        if fits_cpu(inputs, self.weight, self.bias) and batch[0].dtype == self.weight.dtype:
            affine = (self.weight, self.bias)
            return renormalize_on_cpu(inputs, affine, batch, self.blended, self.eps)
        slope, shift = self._correct(batch, moments)
        dtype = torch.promote_types(
            inputs.dtype, torch.float32
        )  # half precision is normalised by moments in float32
        return self._normalize_fused(inputs, slope.to(dtype), shift.to(dtype))[0]

    def _correct(self, batch: tuple[Tensor, Tensor], moments: Moments) -> tuple[Tensor, Tensor]:
        """The scale w r and the shift b + w d [c]."""
        (batch_mean, batch_variance), (mean, scale, _) = batch, moments
        r, d = (batch_variance + self.eps).sqrt() * scale, (batch_mean - mean) * scale
        slope, shift = (r, d) if self.weight is None else (self.weight * r, self.weight * d)
        return slope, shift if self.bias is None else self.bias + shift

    def _fits_kernels(self, inputs: Tensor) -> bool:
        single = all(
            part is not None and part.dtype == torch.float32
            for part in (self.weight, self.bias, self.running_mean)
        )
        on_gpu = single and inputs.is_cuda and fits(inputs)
        return on_gpu and not torch._C._are_functorch_transforms_active()

    def _renormalize_by_kernel(self, inputs: Tensor) -> Tensor:
        """Renormalise on a GPU; the backward pass shares the sums that rows of parameters need."""
        assert self.blend is not None
        assert self.carried is not None
        values = inputs.detach()
        if self.witness is not None and not self.witness.was_asked:
            self._ask(values, self._batch_by_kernel(values), len(inputs))
        carried, share = self._revert(len(inputs), self.trust)
        carried = (carried[0].float(), carried[1].float())
        if not isinstance(share, Tensor):
            share = inputs.new_full((), share, dtype=torch.float32)
        moments = blend(values, carried, share.float(), 1.0, self.eps)
        mean, variance, scale, own_mean, own_scale = moments
        sums = SampleSums(values, mean)
        self.__dict__.update(moments=Moments(mean, scale, sums), blended=(mean, variance))
        if self.witness is not None:
            self.__dict__["believed"] = Believed(own_mean, own_scale, len(inputs), is_scale=True)
        outputs: Tensor = Renormalized.apply(inputs, self.weight, self.bias, moments, sums)  # type: ignore[no-untyped-call]
        return outputs

    def _batch(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [c] of the batch."""
        wide = torch.promote_types(
            inputs.dtype if self.carried is None else self.carried[0].dtype, torch.float32
        )
        others = [dim for dim in range(inputs.dim()) if dim != 1]
        variance, mean = torch.var_mean(inputs.to(wide), others, correction=0)
        return mean, variance

    def _batch_by_kernel(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance [c] if nothing is differentiated, by torch's own kernels: several
        times as fast.
        """
        if inputs.is_cuda:  # half precision too
            mean, scale = torch.batch_norm_stats(inputs, self.eps)
            return mean, (scale.square().reciprocal() - self.eps).clamp_min(0)
        if inputs.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            inputs = inputs.float()
        one = two = None
        if inputs.dtype == torch.bfloat16:  # moments come in the dtype of running ones
            one, two = inputs.new_zeros((2, self.num_features), dtype=torch.float32)
        mean, variance = torch.batch_norm_update_stats(inputs, one, two, 0.0)
        return mean, variance

    def _is_bounded(self, inputs: Tensor) -> bool:
        """Whether a row that is far off must not count in full: one value of a sample is all that
        a channel has.
        """
        return self.witness is not None and inputs.numel() == len(inputs) * self.num_features

    def _bound(self, inputs: Tensor) -> Tensor:
        """Values within some deviations of the carried mean."""
        assert self.carried is not None
        mean, variance = self.carried
        shape, reach = (-1, *[1] * (inputs.dim() - 2)), _FAR * (variance + self.eps).sqrt()
        low, high = (mean - reach).view(shape), (mean + reach).view(shape)
        return (inputs if self.exact else inputs.detach()).to(mean.dtype).clamp(low, high)

    def _believe(
        self, bounded: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The moments of bounded values, or of all if they are of another domain."""
        assert self.witness is not None
        if self.witness.least is None:
            return bounded
        mean, variance = (
            torch.lerp(*pair, self.witness.least.to(pair[0]))
            for pair in zip(bounded, batch, strict=True)
        )
        return mean, variance

    def _ask(self, inputs: Tensor, batch: tuple[Tensor, Tensor], samples: int) -> None:
        """Let the first layer of a pass witness a change of domain."""
        if self.witness is None or self.witness.was_asked:
            return
        assert self.carried is not None
        self.witness.was_asked = True
        if samples == 1:
            return
        mean = batch[0].detach()
        carried = (self.carried[0].to(mean), self.carried[1].to(mean) + self.eps)
        own = (mean, batch[1].detach() + self.eps)
        if self._is_bounded(inputs):
            self.witness.answer(mean_shift(carried, own), samples)
            return
        means = gather_samples(inputs.detach().flatten(2).mean(2, dtype=mean.dtype))
        self.witness.answer(moment_shift(carried, own, means), samples)

    def _share(self, samples: int, trust: Tensor | float) -> Tensor | float:
        """α of a batch."""
        blend, witness = self.blend, self.witness
        assert isinstance(blend, (PseudoCount, Ema))
        if witness is None or (least := witness.least) is None:
            return blend.share(samples) * trust
        own: Tensor | float = witness.once(
            "share", trust, samples, lambda: least.clamp(min=blend.share(samples) * trust)
        )
        return own

    def _blend(self, batch: tuple[Tensor, Tensor], samples: int) -> tuple[Tensor, Tensor]:
        """Mean and variance [c] by which to normalise."""
        if self.witness is not None:
            self.__dict__["believed"] = Believed(batch[0].detach(), batch[1].detach(), samples)
        return self._mixture(batch, samples, self.trust)

    def carry_on(self, trust: Tensor | float) -> tuple[Tensor, Tensor]:
        """Mean and variance [c] for the next batch, if the last one has this trust."""
        if self.believed is None:
            assert self.carried is not None
            return self.carried
        return self._mixture(
            self.believed.moments(self.eps), self.believed.samples, trust, anew=True
        )

    def _mixture(
        self,
        batch: tuple[Tensor, Tensor],
        samples: int,
        trust: Tensor | float,
        anew: bool = False,
    ) -> tuple[Tensor, Tensor]:
        carried, share = self._revert(samples, trust, anew)
        return _mix(carried, batch, share)

    def _revert(
        self, samples: int, trust: Tensor | float, anew: bool = False
    ) -> tuple[tuple[Tensor, Tensor], Tensor | float]:
        """What a batch with this trust is blended with, and what is left to it of its share α, α ν:
        the source's moments have the rest. ``anew``: with another trust than the pass has.
        """
        assert self.carried is not None
        if not isinstance(self.novelty, Tensor):  # nobody has asked
            return self.carried, self._share(samples, trust)
        if self.together is not None and not anew:
            return self.together.revert(self, samples)
        left, part = self._divide_share(samples, trust)
        assert self.running_mean is not None
        assert self.running_var is not None
        return _mix(self.carried, (self.running_mean, self.running_var), part), left

    def _divide_share(self, samples: int, trust: Tensor | float) -> tuple[Tensor, Tensor]:
        """α ν, and what the source's moments get of the carried ones."""
        share, novelty = self._share(samples, trust), self.novelty
        assert isinstance(novelty, Tensor)
        split = partial(self._split, share, novelty)
        return split() if self.witness is None else self.witness.once("split", share, 0, split)

    def _split(self, share: Tensor | float, novelty: Tensor) -> tuple[Tensor, Tensor]:
        """α ν, and what the source's moments get of the carried ones."""
        if self.witness is not None and self.witness.least is not None:
            novelty = torch.maximum(novelty, self.witness.least.to(novelty))
        left = share * novelty
        return left, (share - left) / (1 - left).clamp_min(torch.finfo(left.dtype).tiny)


class Believed(NamedTuple):
    """What a layer has blended with what it carries."""

    mean: Tensor  # [c]
    spread: Tensor  # [c], the variance
    samples: int
    is_scale: bool = False  # whether it is 1 / √(variance + ε)

    def moments(self, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and variance."""
        return self.mean, self.spread.pow(-2) - eps if self.is_scale else self.spread


class Together:
    """What all layers of a pass blend, of all of them at once: layer by layer the same few
    operations on short vectors are hundreds of launches on a GPU.

    The first ``early`` layers have one trust in a batch, the others another one.
    """

    def __init__(self, norms: Sequence[TwinBatchNorm], early: int) -> None:
        self._norms, self._sizes = norms, [norm.num_features for norm in norms]
        self._groups = [sizes for sizes in (self._sizes[:early], self._sizes[early:]) if sizes]
        self._heads = [norms[0], norms[early]] if 0 < early < len(norms) else [norms[0]]
        self._places = {id(norm): place for place, norm in enumerate(norms)}
        self._early, self._running = (
            early,
            self._gather(
                [(norm.running_mean, norm.running_var) for norm in norms]  # type: ignore[misc]
            ),
        )
        self.forget()

    @staticmethod
    def fits(norms: Sequence[TwinBatchNorm]) -> bool:
        """Whether all layers are of one dtype, device and ε."""
        kinds = {
            (part.dtype, part.device, norm.eps) if part is not None else None
            for norm in norms
            for part in (norm.running_mean, norm.running_var)
        }
        return len(norms) > 1 and len(kinds) == 1 and None not in kinds

    def forget(self) -> None:
        """Another pass begins."""
        self._reverted: dict[int, list[tuple[tuple[Tensor, Tensor], Tensor]]] = {}

    def revert(self, norm: TwinBatchNorm, samples: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What a layer blends a batch with, and the share that is left to it."""
        if samples not in self._reverted:
            trusts = [head.trust for head in self._heads]
            (means, variances), left = self._revert(samples, trusts)
            parts = zip(means.split(self._sizes), variances.split(self._sizes), strict=True)
            shares = [left[place >= self._early] for place in range(len(self._norms))]
            self._reverted[samples] = list(zip(parts, shares, strict=True))
        return self._reverted[samples][self._places[id(norm)]]

    def carry_on(self, trusts: Sequence[Tensor | float]) -> Tensor | None:
        """What all layers carry to the next batch [2 · channels], if the last one has this trust in
        each group; None if some have not seen a batch, or others than the rest.
        """
        seen = [norm.believed for norm in self._norms]
        known = [own for own in seen if own is not None]
        kinds = {(own.samples, own.is_scale, own.mean.dtype) for own in known}
        if len(known) < len(seen) or len(kinds) > 1:
            return None
        if not isinstance(self._norms[0].novelty, Tensor):
            return None
        samples, is_scale, _ = kinds.pop()
        carried, left = self._revert(samples, trusts)
        mean, spread = self._gather([own[:2] for own in known])
        own = Believed(mean, spread, samples, is_scale).moments(self._norms[0].eps)
        moments = _mix(carried, own, self._spread(left, mean))
        pairs = zip(*(part.split(self._sizes) for part in moments), strict=True)
        return torch.cat([part for pair in pairs for part in pair])

    def _revert(
        self, samples: int, trusts: Sequence[Tensor | float]
    ) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
        """The same of all layers [channels], and what is left to each group []."""
        pairs = zip(self._heads, trusts, strict=True)
        left, parts = zip(*(head._divide_share(samples, own) for head, own in pairs), strict=True)
        carried = self._gather([norm.carried for norm in self._norms])  # type: ignore[misc]
        return _mix(carried, self._running, self._spread(parts, carried[0])), list(left)

    def _spread(self, numbers: Sequence[Tensor], like: Tensor) -> Tensor:
        """A number [] of each group, for each of its channels [channels]."""
        pairs = zip(numbers, self._groups, strict=True)
        return torch.cat([own.to(like).expand(sum(sizes)) for own, sizes in pairs])

    def _gather(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Means and variances of all layers [channels]."""
        means, variances = zip(*pairs, strict=True)
        return torch.cat(means), torch.cat(variances)


def _mix(
    carried: tuple[Tensor, Tensor], batch: tuple[Tensor, Tensor], share: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Moments of the mixture: see the top of this file; in float32 at least."""
    (mean, variance), (own_mean, own_variance) = carried, batch
    wide = torch.promote_types(own_mean.dtype, torch.float32)
    if not mean.dtype == own_mean.dtype == wide:
        mean, variance, own_mean, own_variance = (part.to(wide) for part in (*carried, *batch))
    shift = own_mean - mean
    spread = (own_variance - variance) + (1 - share) * shift.square()
    return mean + share * shift, variance + share * spread


def _scale_and_shift(
    inputs: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(x - mean) scale w + b, for channels' moments [c], or [n, c] of each sample."""
    slope = scale if weight is None else scale * weight
    shift = -mean * slope if bias is None else bias - mean * slope
    shape = (*slope.shape, *[1] * (inputs.dim() - 2))
    return torch.addcmul(shift.view(shape), inputs.to(mean.dtype), slope.view(shape)).to(
        inputs.dtype
    )


def is_plain(module: nn.Module) -> bool:
    """Whether a layer is a batch norm that does what torch's does."""
    known = (_BatchNorm.forward, nn.SyncBatchNorm.forward, TwinBatchNorm.forward)
    return isinstance(module, _BatchNorm) and type(module).forward in known


def prepare(module: nn.Module, statistics: Statistics) -> list[TwinBatchNorm]:
    """Turn the batch norms of a twin, in place, into ones that use these statistics; those that
    change are listed.
    """
    return [
        _turn(layer if is_plain(layer) else _inside(layer, name, statistics), statistics)
        for name, layer in list(module.named_modules())
        if isinstance(layer, _BatchNorm) and (statistics != "source" or layer.running_mean is None)
    ]


def share(norms: list[TwinBatchNorm], shards: Shards | None) -> None:
    """Tell batch norms how the next batch is divided among ranks."""
    for norm in norms:
        norm.__dict__["shards"] = shards  # a module's own __setattr__ takes as long as a kernel


def _inside(layer: Any, name: str, statistics: Statistics) -> nn.Module:
    """The normalisation inside a batch norm with a forward of its own (with an activation, say), as
    a layer within it.
    """
    inner = TwinBatchNorm(
        layer.num_features, layer.eps
    )  # of any dimensions: the layer around it has checked them
    inner._parameters.update({own: layer._parameters[own] for own in ("weight", "bias")})
    inner._buffers.update(layer._buffers)
    own, blending = (
        layer.forward,
        not isinstance(statistics, str) and layer.running_mean is not None,
    )
    layer.track_running_stats, layer.running_mean, layer.running_var = (
        False,
        None,
        None,
    )  # should it normalise by itself
    layer.inner = inner.eval()

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Redirected(layer) as redirected:
            outputs = own(*args, **kwargs)
        require(
            redirected.called or not blending,
            "Network: statistics",
            statistics,
            f"'batch' or 'source' for {name}, a {type(layer).__name__}",
        )
        return outputs

    layer.forward = forward
    return layer.inner  # type: ignore[no-any-return]


class _Redirected(TorchFunctionMode):
    """F.batch_norm with a layer's own scale and shift goes to the layer inside it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.called = layer, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            given = inspect.signature(functional.batch_norm).bind(*args, **kwargs).arguments
            if given.get("weight") is self.layer.weight and given.get("bias") is self.layer.bias:
                self.called = True
                return self.layer.inner(given["input"])
        return func(*args, **kwargs)


def _turn(layer: Any, statistics: Statistics) -> TwinBatchNorm:
    missing = layer.running_mean is None
    layer.__dict__["own_check"] = type(layer)._check_input_dim
    layer.__class__ = TwinBatchNorm  # the twin's own layer: the same one, with other statistics
    layer.blend = None if isinstance(statistics, str) or missing else statistics
    layer.rule = layer.blend if isinstance(layer.blend, NormRule) else None
    layer.trust = 1.0
    layer.believed = None
    layer.carried = None if missing else (layer.running_mean, layer.running_var)
    turned: TwinBatchNorm = layer
    return turned


register(statistics=(PseudoCount, Ema, RunningStatistics))
