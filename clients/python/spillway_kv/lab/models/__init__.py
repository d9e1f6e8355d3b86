"""Which causal architectures of the installed transformers work, found out with tiny models."""
