"""Every public name; ``driftfilter`` itself loads them on first use."""

from driftfilter.augmentation import Consistency, GaussianNoise, MarginalEntropy
from driftfilter.belief import Belief
from driftfilter.checks import NotPositiveDefiniteError
from driftfilter.covariance import Blocks, Covariance, Diagonal, Full
from driftfilter.curvature import Curvature, EmpiricalFisher, GaussNewton, Hessian, NoCurvature
from driftfilter.dynamics import Affine, Dynamics, LocalTrend, MeanReversion, PrecisionReversion, RandomWalk, Seasonal
from driftfilter.filtering import Filter, FilterState, NoInformationWarning, Outputs, StepInfo
from driftfilter.inference import SGD, Adam, Bong, GradientStep, Inference, Linearized, Variational
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
from driftfilter.network import Network
from driftfilter.noise import Discount, FullNoise, Isotropic, NoiseModel, NoNoise, Reset, Restore, Stationary
from driftfilter.observation import Gibbs
from driftfilter.parameters import AllParameters, ByName, Head, NormAffine, Selection, select
from driftfilter.prediction import MAP, LinearizedGaussian, LinearizedProbit, MonteCarlo, Prediction, PredictionRule
from driftfilter.predictive import LinearHead, PredictiveModel
from driftfilter.recipe import VARIANTS, from_toml, to_toml
from driftfilter.source import fit_laplace
from driftfilter.statistics import Ema, PseudoCount
from driftfilter.transition import BlockDynamics, Transition
from driftfilter.weighting import Constant, DiversityGate, EntropyGate, Product, Reliability, Weighting

__all__ = [
    "MAP",
    "SGD",
    "VARIANTS",
    "Adam",
    "Affine",
    "AllParameters",
    "Belief",
    "BlockDynamics",
    "Blocks",
    "Bong",
    "ByName",
    "ConjugatePseudoLabel",
    "Consistency",
    "Constant",
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
    "Filter",
    "FilterState",
    "Full",
    "FullNoise",
    "GaussNewton",
    "GaussianNoise",
    "GeneralizedCrossEntropy",
    "Gibbs",
    "GradientStep",
    "Head",
    "Hessian",
    "Inference",
    "InformationMaximization",
    "Isotropic",
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
    "MonteCarlo",
    "Network",
    "NoCurvature",
    "NoInformationWarning",
    "NoNoise",
    "NoiseModel",
    "NormAffine",
    "NotPositiveDefiniteError",
    "Outputs",
    "PrecisionReversion",
    "Prediction",
    "PredictionRule",
    "PredictiveModel",
    "Product",
    "PseudoCount",
    "PseudoLabel",
    "RandomWalk",
    "Reliability",
    "Reset",
    "Restore",
    "Seasonal",
    "Selection",
    "SoftLikelihoodRatio",
    "Stationary",
    "StepInfo",
    "Sum",
    "Transition",
    "Variational",
    "Weighting",
    "fit_laplace",
    "from_toml",
    "select",
    "to_toml",
]
