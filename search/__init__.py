"""The loop from results back to runs: a search for LR* in place of a full grid.

Everything else in the suite points one way: sweeps -> experiments -> runs -> analysis. A search goes round:
what the analysis says of the runs so far decides which are launched next. It therefore belongs to neither end and
stands above both: it may import ``sweeps`` (to launch) and ``analysis`` (to estimate), and nothing imports it, so
that no arrow of the suite turns round. ``lattice``, ``design`` and ``propose`` are pure maths, numbers in and out.
"""
