"""Many arms trained at once on one frozen base model (see ``train``)."""
