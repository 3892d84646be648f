"""Every model class of transformers' Auto mappings, built small and without memory."""
