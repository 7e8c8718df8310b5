"""The screen of attention heads on prompts that are made for it: who copies from far, who goes on with what came before, who looks at the first token.

Not here: the scores themselves (``heads.py``), or what is done with them.
"""

import random

import torch
from jaxtyping import Float64, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from assay.ops.evaluate.heads import NeedlePrompt, induction_scores, needle_prompt, random_sequences, retrieval_scores, sink_scores

HAY, DEPTHS = 192, (10, 40, 70, 95)  # tokens before the question; percent of them before the needle
SEQUENCES, LENGTH = 8, 64  # of random tokens, each read twice
CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Perth", "Turin", "Malmö")


def screen(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, windows: Int[Tensor, "windows length"], *, seed: int = 0
) -> dict[str, Float64[Tensor, "layers heads"]]:
    """Each head's ``retrieval`` (share of copied tokens that it looks at), ``induction`` and ``sink`` (shares of its attention), 0 to 1.

    Args:
        windows: text; the first tokens of each are haystacks, and whole ones show who looks at the first token.
    """
    bos, special = tokenizer.bos_token_id, [token for token in tokenizer.all_special_ids if token is not None]
    sequences = random_sequences(len(tokenizer), sequences=SEQUENCES, length=min(LENGTH, len(tokenizer) // 2), seed=seed, without=special)
    return {
        "retrieval": retrieval_scores(model, needles(tokenizer, windows, seed=seed)),
        "induction": induction_scores(model, sequences, first=bos if isinstance(bos, int) else None),
        "sink": sink_scores(model, windows[:SEQUENCES]),
    }


def needles(tokenizer: PreTrainedTokenizerBase, windows: Int[Tensor, "windows length"], *, seed: int) -> list[NeedlePrompt]:
    """A number of seven digits in a text, asked for at its end, at each of ``DEPTHS`` in turn; one prompt a window, eight at most."""
    drawn, prompts = random.Random(seed), []

    def ids(text: str) -> Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])

    for number, window in enumerate(windows[:SEQUENCES].cpu()):
        city, code = CITIES[number % len(CITIES)], str(drawn.randrange(10**6, 10**7))
        question, answer = ids(f"\nThe secret number of {city} is"), ids(f" {code}.")
        needle = torch.cat([ids(f"\nThe secret number of {city} is"), answer, ids("\n")])
        prompts.append(needle_prompt(window[:HAY], needle, question, answer, depth_pct=DEPTHS[number % len(DEPTHS)]))
    return prompts
