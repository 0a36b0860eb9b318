"""What the runs on somebody's own task advise: ``make regret``.

``advice`` decides, from a table of runs and what is known of the task; ``context`` says what the post and this
repository's own results add; ``page`` writes it down. All pure: tables and numbers in, text out. ``sweeps.search``
launches the runs.
"""
