"""Softmax cross-entropy, of logits or of a linear layer."""
