"""A store that is being written, on a page that keeps itself up to date."""
