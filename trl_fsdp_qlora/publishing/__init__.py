"""Publishing: the model card, recorded logits, merging, and the upload of an adapter."""
