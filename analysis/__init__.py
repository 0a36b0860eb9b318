"""Run directories in; tables, figures and verdicts out. No torch, no network."""

from analysis.load import load, load_curves

__all__ = ["load", "load_curves"]
