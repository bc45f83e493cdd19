"""Fields of single requests that a data set sets in their bodies: schemas, tools, images.

`images` of a row are URLs, or `512x384`: a noise image of that size, made when it is sent. Tools
stand in the prompt and are counted with it; what an image takes depends on the model, and the row
says it.
"""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .errors import SloBenchError

Body = Mapping[str, Any]
IMAGES = "images"  # key of a body that is not sent as it is
_IN_PROMPT = ("tools", "functions")
_SIZE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})")
_STRUCTURED = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "json_schema", "regex", "ebnf"),
)
# Set by the load generator, which reads streams and counts tokens by them.
OWN = ("stream", "stream_options", "n", "prompt", "input", "model")


def checked(body: object) -> dict[str, Any]:
    """The fields of a row.

    Raises:
        SloBenchError: they are no object, or one of them is the load generator's own.
    """
    if not isinstance(body, dict):
        raise SloBenchError(f"body must be a JSON object of request fields, not {body!r:.40}")
    for name in OWN:
        if name in body:
            raise SloBenchError(f"body has {name}, which the load generator sets; leave it out")
    messages = body.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise SloBenchError("messages must be a list of objects")
    images = body.get(IMAGES, [])
    if not isinstance(images, list) or not all(_is_image(image) for image in images):
        raise SloBenchError("images must be a list of URLs and sizes such as 512x384")
    return body


def _is_image(image: object) -> bool:
    return isinstance(image, str) and bool(
        _SIZE.fullmatch(image) or image.startswith(("http://", "https://", "data:image/"))
    )


def prompt_text(body: Body) -> str:
    """What the body adds to the prompt: messages and tools."""
    texts = [json.dumps(body[name], ensure_ascii=False) for name in _IN_PROMPT if name in body]
    for message in body.get("messages", ()):
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [
            str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text")
        ]
    return "\n".join(texts)


def has_images(body: Body) -> bool:
    """Whether an image is sent, in `images` or in a message."""
    contents = (message.get("content") for message in body.get("messages", ()))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return bool(body.get(IMAGES)) or any(
        isinstance(part, dict) and part.get("type") in ("image_url", "image") for part in parts
    )


def check_simulated(bodies: Iterable[Body | None] | None) -> None:
    """Refuse what no step-time model knows.

    Raises:
        SloBenchError: a request has a schema for its answer, or images.
    """
    for body in filter(None, bodies or ()):
        named = [name for name in _STRUCTURED if name in body]
        if named:
            raise SloBenchError(
                f"requests have {named[0]}: what structured output costs an engine is not known "
                "here; measure it on a server (--backend vllm, --base-url), or leave it out"
            )
        if has_images(body):
            raise SloBenchError(
                "requests have images: the time of their encoder is not known here; measure it on "
                "a server (--backend vllm, --base-url), or leave them out"
            )


def with_fields(plain: Body, body: Body, row: int) -> dict[str, Any]:
    """A request's body with the fields of its row.

    Raises:
        SloBenchError: it has messages or images, and the API is not chat.
    """
    fields = {name: value for name, value in body.items() if name != IMAGES}
    images = body.get(IMAGES, ())
    if (images or "messages" in fields) and "messages" not in plain:
        raise SloBenchError(f"request {row} has messages or images; they need --api chat")
    request = {**plain, **fields}
    if images:
        parts = [
            {"type": "image_url", "image_url": {"url": _url(image, row, place)}}
            for place, image in enumerate(images)
        ]
        *before, last = request["messages"]
        content = last.get("content") or ""
        content_parts = (
            content if isinstance(content, list) else [{"type": "text", "text": content}]
        )
        request["messages"] = [*before, {**last, "content": [*content_parts, *parts]}]
    return request


def _url(image: str, row: int, place: int) -> str:
    """A URL as it is; a size as a PNG of noise, alike for the same row and place."""
    size = _SIZE.fullmatch(image)
    if size is None:
        return image
    width, height = int(size[1]), int(size[2])
    rng = np.random.default_rng((row, place))
    pixels = rng.integers(0, 256, (height, width * 3), dtype=np.uint8)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 1)), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return "data:image/png;base64," + base64.b64encode(png).decode()
