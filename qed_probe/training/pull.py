"""Forward and backward of one part of a batch; on a GPU a CUDA graph, as launching its kernels one by one takes longer."""

import torch
from torch import Tensor

from qed_probe.models.language import LanguageModel
from qed_probe.training.objective import measure
from qed_probe.training.recipes import Recipe


class Pull:
    """Adds a part's share of the batch's gradient to that of every parameter, and gives what ``measure`` gives, detached.

    On a GPU the kernels are recorded at the first call and launched as one from then on, so every part has its shape, and the
    gradients stay where they are: they are set to zero, never to None.
    """

    def __init__(self, model: LanguageModel, recipe: Recipe) -> None:
        self._model, self._recipe = model, recipe
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, tokens: Tensor) -> dict[str, Tensor]:
        """The loss and its parts over ``tokens`` ``[micro_batch, length]``."""
        if not tokens.is_cuda:
            return self._run(tokens)
        with torch.cuda.device(tokens.get_device()):
            if self._graph is None:
                self._graph = self._record(tokens)
            self._tokens.copy_(tokens)
            self._graph.replay()
        return {name: value.clone() for name, value in self._found.items()}

    def _run(self, tokens: Tensor) -> dict[str, Tensor]:
        found = measure(self._model, tokens, self._recipe)
        torch.autograd.backward([found["loss"] * (self._recipe.micro_batch / self._recipe.batch)])
        return {name: value.detach() for name, value in found.items()}

    def _record(self, tokens: Tensor) -> torch.cuda.CUDAGraph:
        self._tokens, graph, aside = tokens.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # What is made at a first run, compiled programs, tables and the gradients themselves, must not be part of the graph.
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run(self._tokens)
        torch.cuda.current_stream().wait_stream(aside)
        self._model.zero_grad(set_to_none=False)
        with torch.cuda.graph(graph):
            self._found = self._run(self._tokens)
        return graph
