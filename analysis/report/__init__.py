"""One page of everything that a store or the committed reference results say."""
