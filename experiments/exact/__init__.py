"""What the post claims that needs no training sweep, measured exactly: C9, C21, C23, C24.

One small pure module a claim; ``python -m experiments.exact`` runs them all and writes ``exact.json``.
They measure and never judge: that is the analysis's work.
"""
