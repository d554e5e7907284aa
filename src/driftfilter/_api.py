"""Every public name, said once; ``driftfilter`` itself loads them on first use."""

from driftfilter import callbacks as callbacks, presets as presets
from driftfilter.adapter.adapter import Adapter as Adapter, adapt as adapt
from driftfilter.adapter.bank import Bank as Bank
from driftfilter.adapter.checkpoint import load as load, save as save
from driftfilter.adapter.together import predict_together as predict_together
from driftfilter.base.checks import (
    NotFiniteError as NotFiniteError,
    NotPositiveDefiniteError as NotPositiveDefiniteError,
)
from driftfilter.callbacks import Callback as Callback, StepRecord as StepRecord
from driftfilter.compiled.fleet import Fleet as Fleet
from driftfilter.compiled.scan import why_eager as why_eager
from driftfilter.distributed.ranks import RankError as RankError
from driftfilter.filtering import (
    Filter as Filter,
    FilterState as FilterState,
    NoInformationWarning as NoInformationWarning,
    Outputs as Outputs,
    StepInfo as StepInfo,
)
from driftfilter.gaussian.belief import Belief as Belief, kl_divergence as kl_divergence
from driftfilter.gaussian.blocks import Blocks as Blocks
from driftfilter.gaussian.covariance import Covariance as Covariance
from driftfilter.gaussian.diagonal import Diagonal as Diagonal
from driftfilter.gaussian.full import Full as Full
from driftfilter.gaussian.kronecker import Kronecker as Kronecker
from driftfilter.gaussian.lowrank import LowRank as LowRank
from driftfilter.inference.accuracy import Estimate as Estimate
from driftfilter.inference.curvature import (
    Curvature as Curvature,
    EmpiricalFisher as EmpiricalFisher,
    GaussNewton as GaussNewton,
    Hessian as Hessian,
    NoCurvature as NoCurvature,
)
from driftfilter.inference.iterates import (
    ContinualMomentum as ContinualMomentum,
    LatentWeights as LatentWeights,
    SteadyState as SteadyState,
)
from driftfilter.inference.laplacian import LaplacianAdjustment as LaplacianAdjustment
from driftfilter.inference.linearized import (
    Bong as Bong,
    Frozen as Frozen,
    Inference as Inference,
    Linearized as Linearized,
)
from driftfilter.inference.optimizers import (
    SGD as SGD,
    Adam as Adam,
    AdamW as AdamW,
    GradientStep as GradientStep,
)
from driftfilter.inference.prediction import (
    MAP as MAP,
    FromTeacher as FromTeacher,
    LinearizedGaussian as LinearizedGaussian,
    LinearizedProbit as LinearizedProbit,
    Moderated as Moderated,
    MonteCarlo as MonteCarlo,
    Prediction as Prediction,
    PredictionRule as PredictionRule,
    PriorCorrection as PriorCorrection,
    Tempered as Tempered,
)
from driftfilter.inference.resets import (
    ResetBelow as ResetBelow,
    ResetEvery as ResetEvery,
    RestoreIrrelevant as RestoreIrrelevant,
    RestoreRandomly as RestoreRandomly,
    Upkeep as Upkeep,
)
from driftfilter.inference.variational import Variational as Variational
from driftfilter.model.batch_losses import (
    BatchLoss as BatchLoss,
    CentroidLabel as CentroidLabel,
    Contrast as Contrast,
    MomentAlignment as MomentAlignment,
    Seen as Seen,
    SourceReplay as SourceReplay,
)
from driftfilter.model.buffers import (
    Buffer as Buffer,
    CategoryBalanced as CategoryBalanced,
    PredictionBalanced as PredictionBalanced,
)
from driftfilter.model.centering import Centering as Centering
from driftfilter.model.composed import BlockDynamics as BlockDynamics, SumDynamics as SumDynamics
from driftfilter.model.domains import Domains as Domains
from driftfilter.model.dynamics import (
    Affine as Affine,
    Dynamics as Dynamics,
    LocalTrend as LocalTrend,
    MeanReversion as MeanReversion,
    PrecisionReversion as PrecisionReversion,
    RandomWalk as RandomWalk,
    Seasonal as Seasonal,
)
from driftfilter.model.label_chain import LabelChain as LabelChain
from driftfilter.model.looking import ProbabilityDrop as ProbabilityDrop
from driftfilter.model.losses import (
    ConjugatePseudoLabel as ConjugatePseudoLabel,
    Entropy as Entropy,
    GeneralizedCrossEntropy as GeneralizedCrossEntropy,
    InformationMaximization as InformationMaximization,
    Loss as Loss,
    MarginalLikelihood as MarginalLikelihood,
    PseudoLabel as PseudoLabel,
    RunningInformation as RunningInformation,
    Softened as Softened,
    SoftLikelihoodRatio as SoftLikelihoodRatio,
    Sum as Sum,
)
from driftfilter.model.noise import (
    Discount as Discount,
    FullNoise as FullNoise,
    Isotropic as Isotropic,
    NoiseModel as NoiseModel,
    NoNoise as NoNoise,
    Reset as Reset,
    Restore as Restore,
    Stationary as Stationary,
)
from driftfilter.model.observation import Gibbs as Gibbs, Teacher as Teacher
from driftfilter.model.opinion import OpinionEntropy as OpinionEntropy
from driftfilter.model.predictive import (
    LinearHead as LinearHead,
    PredictiveModel as PredictiveModel,
)
from driftfilter.model.transition import Transition as Transition
from driftfilter.model.views import (
    Consistency as Consistency,
    GaussianNoise as GaussianNoise,
    ImageViews as ImageViews,
    MarginalEntropy as MarginalEntropy,
    Mirror as Mirror,
    PatchShuffle as PatchShuffle,
)
from driftfilter.model.weighting import (
    Batch as Batch,
    CertaintyDiversity as CertaintyDiversity,
    Constant as Constant,
    DiversityGate as DiversityGate,
    EntropyGate as EntropyGate,
    LookingWeighting as LookingWeighting,
    Product as Product,
    Recency as Recency,
    Reliability as Reliability,
    RunGate as RunGate,
    Weighting as Weighting,
)
from driftfilter.monitor.monitor import AlarmWarning as AlarmWarning, Monitor as Monitor
from driftfilter.monitor.state import Event as Event, Signals as Signals
from driftfilter.networks.batch_norm import (
    Ema as Ema,
    PseudoCount as PseudoCount,
    RunningStatistics as RunningStatistics,
)
from driftfilter.networks.batch_trust import ForgetAtHome as ForgetAtHome
from driftfilter.networks.features import (
    Backbone as Backbone,
    OnFeatures as OnFeatures,
    find_head as find_head,
)
from driftfilter.networks.lora import LoRA as LoRA
from driftfilter.networks.network import Network as Network
from driftfilter.networks.norm_rules import (
    InstanceAware as InstanceAware,
    NormCall as NormCall,
    NormRule as NormRule,
    RobustStatistics as RobustStatistics,
)
from driftfilter.networks.parameters import (
    AllParameters as AllParameters,
    ByName as ByName,
    Head as Head,
    NoParameters as NoParameters,
    NormAffine as NormAffine,
    Selection as Selection,
    Smallest as Smallest,
    select as select,
)
from driftfilter.networks.prototypes import (
    Mixture as Mixture,
    PrototypeHead as PrototypeHead,
    Prototypes as Prototypes,
    Supports as Supports,
)
from driftfilter.recipe import (
    VARIANTS as VARIANTS,
    Recipe as Recipe,
    from_toml as from_toml,
    to_toml as to_toml,
)
from driftfilter.source.given import (
    Given as Given,
    marginal_source as marginal_source,
)
from driftfilter.source.posterior import (
    Gaussian as Gaussian,
    Laplace as Laplace,
    PointMass as PointMass,
    Source as Source,
    SourceData as SourceData,
    fit_laplace as fit_laplace,
)
from driftfilter.storage.sealed import CheckpointError as CheckpointError
