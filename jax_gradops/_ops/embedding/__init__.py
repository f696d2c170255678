"""The lookup of embeddings, and the gradient of their table."""
