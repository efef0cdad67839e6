"""Bridges to other programs' formats: Hugging Face's safetensors folders, PyTorch's distributed checkpoint, ``torch.save``."""
