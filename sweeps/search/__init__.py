"""The loop from results back to runs: a search for LR* in place of a full grid, ``make sweep-lr SEARCH=adaptive``.

Everything else in the suite points one way: sweeps -> experiments -> runs -> analysis. A search goes round: what
the analysis says of the runs so far decides which are launched next. So this package alone, of all in ``sweeps``,
imports ``analysis``, and nothing imports it. ``rungs``, ``look`` and ``propose`` are pure: numbers in and out.
"""
