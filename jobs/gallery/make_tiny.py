"""Write jobs/gallery/tiny/: the configuration of a tiny Llama, a tokenizer of bytes, and sums as texts.

Call: python3 jobs/gallery/make_tiny.py, with transformers 5.24.0. The programs create the model from the configuration,
so there are no weights and nothing is downloaded.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

TINY = Path(__file__).parent / "tiny"
SPECIAL = ["<s>", "</s>", "<pad>"]


def main() -> None:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*bytes_, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    begin, end, pad = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad)
    fast.save_pretrained(TINY)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=vocabulary[begin],
        eos_token_id=vocabulary[end],
        pad_token_id=vocabulary[pad],
    ).save_pretrained(TINY)
    sums = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(40) for b in range(40)]
    (TINY / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))


if __name__ == "__main__":
    main()
