"""Blocks of every class that compiled code covers, as compiled.plan.COVERED lists them, and what
tests of that code share.
"""

from typing import Any

import torch

import driftfilter as df
from driftfilter.compiled.plan import COVERED

# Options worth a case beside the defaults, which a class without an entry is tried with.
OPTIONS: dict[type, list[dict[str, Any]]] = {
    df.SoftLikelihoodRatio: [{"ceiling": 0.9}],
    df.PseudoLabel: [{}, {"threshold": 0.8}],
    df.GeneralizedCrossEntropy: [{"q": 0.5}],
    df.Sum: [
        {
            "terms": (
                df.Entropy(),
                df.PseudoLabel(0.7),
                df.Sum((df.InformationMaximization(),), (0.5,)),
            ),
            "coefficients": (1.0, 0.3, 2.0),
        },
        {
            "terms": (
                df.Entropy(),
                df.PseudoLabel(0.7),
                df.Sum((df.GeneralizedCrossEntropy(0.3),), (0.5,)),
            ),
            "coefficients": (1.0, 0.3, 2.0),
        },
        {"terms": (df.PseudoLabel(0.7), df.PseudoLabel(0.9)), "coefficients": (1.0, 0.5)},
    ],
    df.Constant: [{"beta": 2.0}],
    df.Reliability: [{"beta": 3.0}],
    df.EntropyGate: [
        {"fraction": 0.6, "beta": 2.0},
        {"fraction": 0.7, "beta": 2.0, "weighted": False},
    ],
    df.Product: [{"factors": (df.Constant(0.5), df.EntropyGate(0.8), df.Reliability())}],
    df.EmpiricalFisher: [{}, {"centered": False, "scale": 0.7}],
    df.Tempered: [{"temperature": 1.7}],
    df.LinearizedProbit: [{}, {"form": "per_class"}],
}


def blocks(role: str) -> dict[str, Any]:
    """Blocks of a role by name."""
    made = [block(**options) for block in COVERED[role] for options in OPTIONS.get(block, [{}])]
    return {f"{type(block).__name__}{position}": block for position, block in enumerate(made)}


LOSSES, WEIGHTINGS = blocks("loss"), blocks("weighting")
CURVATURES, PREDICTIONS = blocks("curvature"), blocks("prediction")
STRUCTURES = [structure.__name__.lower() for structure in COVERED["covariance"]]


def build(**parts: Any) -> df.Filter:
    """Logistic regression, or what the parts make of it."""
    usual: dict[str, Any] = {
        "logits": df.LinearHead(2),
        "transition": df.Transition(df.MeanReversion(0.95), df.Isotropic(0.01)),
        "observation": df.Gibbs(df.Entropy()),
        "inference": df.Linearized(df.Hessian()),
        "prediction": df.LinearizedProbit(),
    }
    return df.Filter(**{**usual, **parts})


def assert_close(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
