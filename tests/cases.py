"""The cases in tests/data/cases, and how a metric's values are read in tests."""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def case(name: str) -> dict:
    return json.loads((HERE / "data" / "cases" / f"{name}.json").read_text())


def reduced(value) -> float:
    if isinstance(value, tuple):
        return value[0] / value[1]
    return float(np.mean(value)) if isinstance(value, list) else value
