"""lm-eval's model ``hf-kvq``: a Hugging Face model that answers through a compressed cache."""
