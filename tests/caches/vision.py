"""Tiny models of images and text with random weights, and their processors: real pixels, real expansion to tokens.

Image processors are those of Transformers on PIL and numpy; their makers' chat templates are shortened to what tells
messages apart. Video processors of Transformers need torchvision, so `Video` stands for them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from tests.caches.chats import byte_tokenizer

PATCH, MERGE = 8, 2
SIDE = 32
"""Of a picture, in pixels: two by two tokens of Qwen's, InternVL's and Gemma's, four by four of LLaVA's."""

_PART = "{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}"
_CONTENT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    + _PART
    + "{% endfor %}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    + _CONTENT
    + "\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    + _CONTENT
    + "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    + _CONTENT
    + "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_QWEN = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")

# Family: class prefix, tokenizer, template, how images and videos are written, whether there are videos.
FAMILIES: dict[str, tuple[str, str, str, tuple[str, str], bool]] = {
    "qwen2-vl": ("Qwen2VL", "qwen2_5", CHATML, _QWEN, True),
    "qwen2.5-vl": ("Qwen2_5_VL", "qwen2_5", CHATML, _QWEN, True),
    "qwen3-vl": ("Qwen3VL", "qwen3", CHATML, _QWEN, True),
    "internvl": ("InternVL", "internvl", CHATML, ("<IMG_CONTEXT>", "<video>"), True),
    "gemma3": ("Gemma3", "gemma3", GEMMA, ("<start_of_image>", ""), False),
    "llava": ("Llava", "qwen3", CHATML, ("<image>", ""), False),
}
# Markers that a processor asks its tokenizer for by name.
_NAMED = {
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    # Which no chat format names.
    "llava": {"image_token": "<image>"},
}

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
_MROPE = {"rope_parameters": _ROPE}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": 32,
    "initializer_range": 0.3,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER |= {"image_size": SIDE, "patch_size": PATCH, "initializer_range": 0.3}


class Video:
    """A video processor of Qwen2-VL's kind, or InternVL's, without sampling and resizing.

    Args:
        patches: whether frames become rows of patches.
    """

    merge_size, temporal_patch_size = MERGE, 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, patches: bool) -> None:
        self.patches = patches

    def __call__(self, videos: Any, **kwargs: Any) -> dict[str, Any]:
        """Videos (frames, 3, H, W) of bytes, in lists."""
        while isinstance(videos[0], list):
            videos = [video for some in videos for video in some]
        videos = [torch.as_tensor(np.asarray(video)) for video in videos]
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (_MEAN, _STD))
        frames = [(video / 255 - mean) / std for video in videos]
        metadata = [VideoMetadata(len(x), fps=2.0, frames_indices=list(range(len(x)))) for x in videos]
        if not self.patches:
            return {"pixel_values_videos": torch.stack(frames), "video_metadata": metadata}
        grids = [(len(x) // 2, x.shape[2] // PATCH, x.shape[3] // PATCH) for x in videos]
        rows = [_patches(x, grid) for x, grid in zip(frames, grids, strict=True)]
        return {
            "pixel_values_videos": torch.cat(rows),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": metadata,
        }


_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def _patches(frames: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """(T*H*W, 3*2*P*P): two frames a patch, four patches of a token behind one another."""
    t, h, w = grid
    x = frames.view(t, 2, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)


def _image_processor(family: str) -> Any:
    if family.startswith("qwen"):
        # Pictures keep their size.
        size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 128 * 128}
        patch = {"patch_size": PATCH, "merge_size": MERGE, "size": size}
        return Qwen2VLImageProcessorPil(**patch, image_mean=_MEAN, image_std=_STD)
    size = {"height": SIDE, "width": SIDE}
    if family == "internvl":
        return GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=2)
    if family == "gemma3":
        return Gemma3ImageProcessorPil(size=size)
    return CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)


@functools.cache
def processor(family: str) -> Any:
    """The family's processor, with a tokenizer of bytes and the family's markers."""
    prefix, kind, template, (image, video), videos = FAMILIES[family]
    template = template.replace("IMAGE", image).replace("VIDEO", video)
    tokenizer = byte_tokenizer(kind, template, named=_NAMED.get(family))
    tokenizer.padding_side = "left"
    base = getattr(transformers, f"{prefix}Processor")
    more: dict[str, Any] = {"image_seq_length": (SIDE // PATCH // MERGE) ** 2}
    if family == "llava":
        more = {"patch_size": PATCH, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1}
    elif family.startswith("qwen"):
        more = {}
    if not videos:
        return base(_image_processor(family), tokenizer, chat_template=template, **more)

    class WithVideo(base):
        """Takes `Video` for a video processor."""

        def check_argument_for_proper_class(self, name: str, value: Any) -> Any:
            return type(value) if name == "video_processor" else super().check_argument_for_proper_class(name, value)

    stand_in = Video(family.startswith("qwen"))
    return WithVideo(_image_processor(family), tokenizer, stand_in, chat_template=template, **more)


def config(family: str) -> Any:
    """The family's config at a tiny size, with the ids of the processor's tokens."""
    prefix = FAMILIES[family][0]
    tokenizer = processor(family).tokenizer
    token = tokenizer.convert_tokens_to_ids
    text: dict[str, Any] = _TEXT | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family.startswith("qwen"):
        tower: dict[str, Any] = dict(_QWEN_TOWER)
        ids = {f"{x}_token_id": token(f"<|{x}_pad|>") for x in ("image", "video")}
        ids |= {f"vision_{x}_token_id": token(f"<|vision_{x}|>") for x in ("start", "end")}
        if family == "qwen2-vl":
            # Names of its own: the width of a patch and of what comes out.
            tower = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
            tower |= {"patch_size": PATCH, "initializer_range": 0.3}
        elif family == "qwen2.5-vl":
            tower |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [0], "tokens_per_second": 2}
        else:
            tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        if family != "qwen3-vl":
            text = {key: value for key, value in text.items() if key != "head_dim"} | {"hidden_size": 128}
            tower |= {"out_hidden_size" if family == "qwen2.5-vl" else "hidden_size": 128}
        made = getattr(transformers, f"{prefix}Config")(text_config=text | _MROPE, vision_config=tower, **ids)
    elif family == "internvl":
        square = {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]}
        made = transformers.InternVLConfig(
            text_config={"model_type": "qwen3"} | text,
            vision_config=_TOWER | square,
            image_token_id=token("<IMG_CONTEXT>"),
            image_seq_length=(SIDE // PATCH // MERGE) ** 2,
        )
    elif family == "gemma3":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
        made = transformers.Gemma3Config(
            text_config=text | layers | {"query_pre_attn_scalar": 32},
            vision_config=_TOWER,
            mm_tokens_per_image=(SIDE // PATCH // MERGE) ** 2,
            image_token_index=token("<image_soft_token>"),
            boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
        )
    else:
        made = transformers.LlavaConfig(
            text_config={"model_type": "llama"} | text,
            vision_config={"model_type": "clip_vision_model", "projection_dim": 32} | _TOWER,
            image_token_index=token("<image>"),
            image_seq_length=(SIDE // PATCH) ** 2 + 1,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        )
    return made


@functools.cache
def weights(family: str) -> Any:
    """The family's weights, made once."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config(family)).eval().float()
    for name, parameter in model.named_parameters():
        # Gemma's begins with zeros, and no pixel would go through.
        if name.endswith("mm_input_projection_weight"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.state_dict()


def build(family: str, attention: str | None = None) -> Any:
    """A tiny model in float32; the same weights each time.

    Args:
        family: key of `FAMILIES`.
        attention: attention implementation, if not the one the model has by itself.
    """
    model = transformers.AutoModelForImageTextToText.from_config(config(family)).eval().float()
    model.load_state_dict(weights(family))
    if attention is not None:
        model.set_attn_implementation(attention)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = processor(family).tokenizer.pad_token_id
    return model


def picture(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """Noise of that size."""
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def film(seed: int) -> np.ndarray:
    """u8 (4, 3, SIDE, SIDE), noise."""
    return np.random.default_rng(seed).integers(0, 256, (4, 3, SIDE, SIDE), dtype=np.uint8)


def says(role: str, *parts: Any) -> dict[str, Any]:
    """A message of texts, pictures and videos."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, np.ndarray):
            content.append({"type": "video", "video": part})
        else:
            content.append({"type": "image", "image": part})
    return {"role": role, "content": content}


def prompts(family: str, *conversations: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """What the model is given for conversations, a row each, padded on the left."""
    made = processor(family).apply_chat_template(
        list(conversations),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": True},
    )
    return dict(made)
