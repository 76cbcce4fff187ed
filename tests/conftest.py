"""Without a GPU, Triton programs run in Triton's interpreter, which has to be said before they are compiled."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
