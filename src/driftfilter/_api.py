"""Every public name; ``driftfilter`` itself loads them on first use."""

from driftfilter import callbacks, presets
from driftfilter.adapter.adapter import Adapter, adapt
from driftfilter.adapter.checkpoint import load, save
from driftfilter.base.checks import NotFiniteError, NotPositiveDefiniteError
from driftfilter.callbacks import Callback, StepRecord
from driftfilter.compiled.fleet import Fleet
from driftfilter.compiled.scan import why_eager
from driftfilter.distributed.ranks import RankError
from driftfilter.filtering import Filter, FilterState, NoInformationWarning, Outputs, StepInfo
from driftfilter.gaussian.belief import Belief, kl_divergence
from driftfilter.gaussian.blocks import Blocks
from driftfilter.gaussian.covariance import Covariance
from driftfilter.gaussian.diagonal import Diagonal
from driftfilter.gaussian.full import Full
from driftfilter.gaussian.kronecker import Kronecker
from driftfilter.gaussian.lowrank import LowRank
from driftfilter.inference.curvature import (
    Curvature,
    EmpiricalFisher,
    GaussNewton,
    Hessian,
    NoCurvature,
)
from driftfilter.inference.linearized import Bong, Frozen, Inference, Linearized
from driftfilter.inference.optimizers import SGD, Adam, GradientStep
from driftfilter.inference.prediction import (
    MAP,
    FromTeacher,
    LinearizedGaussian,
    LinearizedProbit,
    Moderated,
    MonteCarlo,
    Prediction,
    PredictionRule,
    PriorCorrection,
    Tempered,
)
from driftfilter.inference.resets import (
    ContinualMomentum,
    ResetBelow,
    ResetEvery,
    RestoreIrrelevant,
    RestoreRandomly,
    Upkeep,
)
from driftfilter.inference.variational import Variational
from driftfilter.model.dynamics import (
    Affine,
    Dynamics,
    LocalTrend,
    MeanReversion,
    PrecisionReversion,
    RandomWalk,
    Seasonal,
)
from driftfilter.model.losses import (
    ConjugatePseudoLabel,
    Entropy,
    GeneralizedCrossEntropy,
    InformationMaximization,
    Loss,
    MarginalLikelihood,
    PseudoLabel,
    SoftLikelihoodRatio,
    Sum,
)
from driftfilter.model.noise import (
    Discount,
    FullNoise,
    Isotropic,
    NoiseModel,
    NoNoise,
    Reset,
    Restore,
    Stationary,
)
from driftfilter.model.observation import Gibbs, Teacher
from driftfilter.model.predictive import LinearHead, PredictiveModel
from driftfilter.model.transition import BlockDynamics, Transition
from driftfilter.model.views import Consistency, GaussianNoise, ImageViews, MarginalEntropy, Mirror
from driftfilter.model.weighting import (
    CertaintyDiversity,
    Constant,
    DiversityGate,
    EntropyGate,
    Product,
    Reliability,
    Weighting,
)
from driftfilter.monitor.monitor import AlarmWarning, Monitor
from driftfilter.monitor.state import Event, Signals
from driftfilter.networks.batch_norm import Ema, PseudoCount
from driftfilter.networks.features import Backbone, OnFeatures, find_head
from driftfilter.networks.lora import LoRA
from driftfilter.networks.network import Network
from driftfilter.networks.parameters import (
    AllParameters,
    ByName,
    Head,
    NormAffine,
    Selection,
    Smallest,
    select,
)
from driftfilter.networks.prototypes import Mixture, PrototypeHead, Prototypes, Supports
from driftfilter.recipe import VARIANTS, Recipe, from_toml, to_toml
from driftfilter.source.posterior import (
    Gaussian,
    Laplace,
    PointMass,
    Source,
    SourceData,
    fit_laplace,
    marginal_source,
)
from driftfilter.storage.sealed import CheckpointError

__all__ = [
    "MAP",
    "SGD",
    "VARIANTS",
    "Adam",
    "Adapter",
    "Affine",
    "AlarmWarning",
    "AllParameters",
    "Backbone",
    "Belief",
    "BlockDynamics",
    "Blocks",
    "Bong",
    "ByName",
    "Callback",
    "CertaintyDiversity",
    "CheckpointError",
    "ConjugatePseudoLabel",
    "Consistency",
    "Constant",
    "ContinualMomentum",
    "Covariance",
    "Curvature",
    "Diagonal",
    "Discount",
    "DiversityGate",
    "Dynamics",
    "Ema",
    "EmpiricalFisher",
    "Entropy",
    "EntropyGate",
    "Event",
    "Filter",
    "FilterState",
    "Fleet",
    "FromTeacher",
    "Frozen",
    "Full",
    "FullNoise",
    "GaussNewton",
    "Gaussian",
    "GaussianNoise",
    "GeneralizedCrossEntropy",
    "Gibbs",
    "GradientStep",
    "Head",
    "Hessian",
    "ImageViews",
    "Inference",
    "InformationMaximization",
    "Isotropic",
    "Kronecker",
    "Laplace",
    "LinearHead",
    "Linearized",
    "LinearizedGaussian",
    "LinearizedProbit",
    "LoRA",
    "LocalTrend",
    "Loss",
    "LowRank",
    "MarginalEntropy",
    "MarginalLikelihood",
    "MeanReversion",
    "Mirror",
    "Mixture",
    "Moderated",
    "Monitor",
    "MonteCarlo",
    "Network",
    "NoCurvature",
    "NoInformationWarning",
    "NoNoise",
    "NoiseModel",
    "NormAffine",
    "NotFiniteError",
    "NotPositiveDefiniteError",
    "OnFeatures",
    "Outputs",
    "PointMass",
    "PrecisionReversion",
    "Prediction",
    "PredictionRule",
    "PredictiveModel",
    "PriorCorrection",
    "Product",
    "PrototypeHead",
    "Prototypes",
    "PseudoCount",
    "PseudoLabel",
    "RandomWalk",
    "RankError",
    "Recipe",
    "Reliability",
    "Reset",
    "ResetBelow",
    "ResetEvery",
    "Restore",
    "RestoreIrrelevant",
    "RestoreRandomly",
    "Seasonal",
    "Selection",
    "Signals",
    "Smallest",
    "SoftLikelihoodRatio",
    "Source",
    "SourceData",
    "Stationary",
    "StepInfo",
    "StepRecord",
    "Sum",
    "Supports",
    "Teacher",
    "Tempered",
    "Transition",
    "Upkeep",
    "Variational",
    "Weighting",
    "adapt",
    "callbacks",
    "find_head",
    "fit_laplace",
    "from_toml",
    "kl_divergence",
    "load",
    "marginal_source",
    "presets",
    "save",
    "select",
    "to_toml",
    "why_eager",
]
