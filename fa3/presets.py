"""What the attention layers of well-known models ask for, by name: `python -m fa3 compile --preset`."""

from dataclasses import dataclass

from fa3.heuristics import DTYPES

LANGUAGE = (True, False)  # a prompt is causal; one new token, which sees everything, is mostly asked for without a mask


@dataclass(frozen=True)
class Preset:
    """Every kernel that a call may run with one of each."""

    models: str
    head_dims: tuple[tuple[int, int], ...]  # of Q and K, of V
    masks: tuple[bool, ...] = LANGUAGE  # causal or not
    dtypes: tuple[str, ...] = ("bfloat16",)
    decodes: bool = True  # with the kernels of attention to a cache


PRESETS = {
    "llama3": Preset("Llama 3 to 3.3", ((64, 64), (128, 128))),
    "qwen": Preset("Qwen 2 to 3, text", ((64, 64), (128, 128))),
    "gemma": Preset("Gemma, layers without window and softcap", ((128, 128), (256, 256))),
    "deepseek": Preset("DeepSeek V2, V3, R1: prompts", ((192, 128),), decodes=False),
    "phi": Preset("Phi 3 and 4", ((96, 96), (128, 128))),
    "nemotron": Preset("Nemotron 4", ((128, 128), (192, 192))),
    "vit": Preset(
        "ViT B to G, CLIP, SigLIP: images",
        ((64, 64), (72, 72), (80, 80), (88, 88), (104, 104)),
        (False,),
        DTYPES,
        False,
    ),
    "grid": Preset("the grid of bench forward", ((64, 64), (128, 128), (256, 256)), (True, False), DTYPES, False),
}


def lines() -> str:
    """The table, for --help."""
    rows = []
    for name, preset in PRESETS.items():
        dims = ", ".join(str(d) if d == d_v else f"{d}/{d_v}" for d, d_v in preset.head_dims)
        masks = " and ".join("causal" if causal else "full" for causal in preset.masks)
        cache = "; cache" if preset.decodes else ""
        rows.append(f"  {name:<9} {preset.models}; {' and '.join(preset.dtypes)}, head dim {dims}, {masks}{cache}")
    return "\n".join(["presets (cache: with attention to a cache):", *rows])
