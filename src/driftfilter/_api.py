"""Every public name; ``driftfilter`` itself loads them on first use."""

from driftfilter import callbacks, presets
from driftfilter.adapter import Adapter, adapt
from driftfilter.augmentation import Consistency, GaussianNoise, ImageViews, MarginalEntropy, Mirror
from driftfilter.belief import Belief
from driftfilter.callbacks import Callback, StepRecord
from driftfilter.checks import NotFiniteError, NotPositiveDefiniteError
from driftfilter.covariance import Blocks, Covariance, Diagonal, Full
from driftfilter.curvature import Curvature, EmpiricalFisher, GaussNewton, Hessian, NoCurvature
from driftfilter.divergence import kl_divergence
from driftfilter.dynamics import Affine, Dynamics, LocalTrend, MeanReversion, PrecisionReversion, RandomWalk, Seasonal
from driftfilter.features import Backbone, OnFeatures, find_head
from driftfilter.filtering import Filter, FilterState, NoInformationWarning, Outputs, StepInfo
from driftfilter.fleet import Fleet
from driftfilter.inference import SGD, Adam, Bong, Frozen, GradientStep, Inference, Linearized, Variational
from driftfilter.kronecker import Kronecker
from driftfilter.lora import LoRA
from driftfilter.losses import (
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
from driftfilter.lowrank import LowRank
from driftfilter.monitor import AlarmWarning, Monitor
from driftfilter.monitor_state import Event, Signals
from driftfilter.network import Network
from driftfilter.noise import Discount, FullNoise, Isotropic, NoiseModel, NoNoise, Reset, Restore, Stationary
from driftfilter.observation import Gibbs, Teacher
from driftfilter.parameters import AllParameters, ByName, Head, NormAffine, Selection, Smallest, select
from driftfilter.prediction import (
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
from driftfilter.predictive import LinearHead, PredictiveModel
from driftfilter.prototypes import Mixture, PrototypeHead, Prototypes, Supports
from driftfilter.recipe import VARIANTS, Recipe, from_toml, to_toml
from driftfilter.saving import CheckpointError, load, save
from driftfilter.scan import why_eager
from driftfilter.shards import RankError
from driftfilter.source import Gaussian, Laplace, PointMass, Source, SourceData, fit_laplace, marginal_source
from driftfilter.statistics import Ema, PseudoCount
from driftfilter.transition import BlockDynamics, Transition
from driftfilter.upkeep import ContinualMomentum, ResetBelow, ResetEvery, RestoreIrrelevant, RestoreRandomly, Upkeep
from driftfilter.weighting import CertaintyDiversity, Constant, DiversityGate, EntropyGate, Product, Reliability, Weighting

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
