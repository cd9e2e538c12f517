"""vLLM as an arm of `bench/rollout.py`, run by the Python of vLLM's own environment: `vllm_peer.py FOLDER DTYPE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from arms import Arm, Conversation, serve


class VLLMArm(Arm):
    """The offline `LLM` with its defaults, its prefix cache among them."""

    def __init__(self, folder: str, dtype: str) -> None:
        import vllm  # it prints while it is imported, so not before `serve` has taken stdout

        self.vllm = vllm
        self.llm = vllm.LLM(model=folder, dtype=dtype, max_model_len=2048, skip_tokenizer_init=True)

    def setup(self, conversations: Sequence[Conversation]) -> str:
        return f"vllm {self.vllm.__version__}"

    def complete(self, texts: Sequence[list[int]], new: Sequence[int]) -> list[list[int]]:
        # Every setting is given: the defaults come from the model's folder.
        kept = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "ignore_eos": True, "detokenize": False}
        sampling = [self.vllm.SamplingParams(max_tokens=count, **kept) for count in new]
        done = self.llm.generate([{"prompt_token_ids": list(text)} for text in texts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]


if __name__ == "__main__":
    serve(VLLMArm, *sys.argv[1:])
