# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `save_checkpoint` and `load_checkpoint`, with MindSpore's messages."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ckptmgr.config.checks import check_optional_count
from ckptmgr.core.arguments import check_is_bool, no_effect
from ckptmgr.core.errors import CheckpointFileNotFound
from ckptmgr.core.names import (
    COMPRESSED_SUFFIX,
    CONTAINER_SUFFIX,
    extension_of,
    without_envelope,
)
from ckptmgr.core.notes import add_note
from ckptmgr.core.trust import Trust
from ckptmgr.core.urls import is_url, refuse_unexpanded
from ckptmgr.files.load.options import everything
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.objects.places import FilePlace, place_of
from ckptmgr.state.arrays import is_mindspore

_FORMATS = ("ckpt", "safetensors")
_REDUNDANCY = "remove_redundancy"  # in the metadata of a safetensors file
_LOG = logging.getLogger(__name__)


def place_of_file(name: str | os.PathLike[str]) -> Path:
    """Return the path of a file to write, links resolved, or its address.

    Raises:
        ValueError: It is the address of no object, or a path that a shell should have expanded.
    """
    if not is_url(name):
        refuse_unexpanded(name)
        return Path(os.path.realpath(name))
    from ckptmgr.objects.paths import checked_address_of_file

    return checked_address_of_file(name)


def save_path(
    save_obj: object, name: object, format: str, *, is_encrypted: bool, is_compressed: bool
) -> Path:
    """Return the path that a save writes: links resolved, with the suffix of its format.

    Raises:
        TypeError, ValueError, IsADirectoryError: An argument is unusable; messages as MindSpore's.
    """
    if format not in _FORMATS:
        raise ValueError(
            f"For 'save_checkpoint', the format must be 'safetensors' or 'ckpt', but got {format}."
        )
    is_network = hasattr(save_obj, "state_dict") or hasattr(save_obj, "parameters_and_names")
    if not isinstance(save_obj, (list, Mapping)) and not is_network:
        raise TypeError(
            "For 'save_checkpoint', the parameter 'save_obj' must be nn.Cell, list or dict, "
            f"but got {type(save_obj)}."
        )
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(
            f"For 'save_checkpoint', the parameter {name} for checkpoint file name is invalid,"
            f"'ckpt_file_name' must be string, but got {type(name)}."
        )
    path = place_of_file(name)
    if path.is_dir():
        raise IsADirectoryError(
            f"For 'save_checkpoint', the parameter `ckpt_file_name`: {path} is a directory, it must be a file name."
        )
    extension = extension_of(format, is_encrypted=is_encrypted, is_compressed=is_compressed)
    if path.name.endswith(extension):
        return path
    if path.name.endswith(format):
        return path.with_name(path.name + extension.removeprefix(format))
    return path.with_name(f"{path.name}.{extension}")


def load_place(name: object, format: str | None, *, trust: Trust) -> FilePlace:
    """Return the place of a file to load, links resolved.

    Raises:
        TypeError, ValueError: An argument is unusable; messages as MindSpore's.
        CheckpointNotFound: There is no such file.
    """
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(
            f"For 'load_checkpoint', the argument 'ckpt_file_name' must be string, but got {type(name)}."
        )
    if format is not None and format not in _FORMATS:
        raise ValueError(
            f"For 'load_checkpoint', the format must be 'safetensors' or 'ckpt', but got {format}."
        )
    text = os.fspath(name)
    endings = (format,) if format is not None else _FORMATS
    if not without_envelope(text).endswith(endings):
        wrong = ValueError(
            "For 'load_checkpoint', the checkpoint file format must same with 'format', but got "
            f"file_name:'{text}', format:'{format or 'ckpt'}'"
        )
        for sentence in _what_it_is(text):
            add_note(wrong, sentence)
        raise wrong
    place = place_of(name, trust=trust)
    if not place.exists():
        raise CheckpointFileNotFound(
            f"For 'load_checkpoint', the checkpoint file: {place.path} does not exist, please check whether the "
            "'ckpt_file_name' is correct.",
            hint=_other_name(place.path),
        )
    return place


def _other_name(path: Path) -> str | None:
    """Return a hint at the encrypted or compressed file that was saved under a name."""
    found = [path.with_name(path.name + ending) for ending in (CONTAINER_SUFFIX, COMPRESSED_SUFFIX)]
    return next(
        (f"it was saved with a key or compressed, as {one}" for one in found if one.exists()), None
    )


def _what_it_is(text: str) -> Iterator[str]:
    """Yield hints about the file under a path that is no name of a checkpoint."""
    from ckptmgr.formats.detect import Kind, detect

    if is_url(text):
        yield "an address ends in the name of a checkpoint: ckptmgr ls URL lists those of a run"
        return
    path = Path(text)
    with suppress(OSError, ValueError):  # no such file, or no such name
        if path.is_dir():
            yield "this is a directory: name a file in it, or use CheckpointManager(directory).resume()"
        elif path.is_file():
            with closing(OsFileSystem().open(path)) as file:
                kind = detect(file)
            if kind is Kind.ZIP_PICKLE:
                yield "this is a torch.save file; convert it with torch.load(weights_only=True) and save_checkpoint"
            elif kind not in (Kind.UNKNOWN, Kind.EMPTY):
                yield f"this is a {kind.value} file under another name: rename it"


def chooser(
    filter_prefix: object, specify_prefix: object, choice_func: Callable[[str], bool] | None
) -> Callable[[str], bool]:
    """Return the function that chooses the names to load.

    Raises:
        TypeError, ValueError: A prefix is unusable; messages as MindSpore's.
    """
    filtered, specified = _prefixes(filter_prefix), _prefixes(specify_prefix)
    if filtered is None and specified is None:
        return choice_func if choice_func is not None else everything

    def choose(name: str) -> bool:
        if filtered is not None and name.startswith(filtered):
            return False
        return specified is None or name.startswith(specified)

    return choose


def _prefixes(given: object) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, (str, list, tuple)):
        raise TypeError(
            "For 'load_checkpoint', the type of 'specify_prefix' or 'filter_prefix' must be string, list[string] or "
            f"tuple[string], but got {type(given)}."
        )
    if not given and not isinstance(given, str):
        raise ValueError(
            "For 'load_checkpoint', the argument 'specify_prefix' or 'filter_prefix' can't be empty when "
            "'specify_prefix' or 'filter_prefix' is list or tuple."
        )
    prefixes = (given,) if isinstance(given, str) else tuple(given)
    for index, prefix in enumerate(prefixes):
        if not isinstance(prefix, str):
            raise TypeError(
                "For 'load_checkpoint', when 'specify_prefix' or 'filter_prefix' is list or tuple, the element in it "
                f"must be string, but got {type(prefix)} at index {index}."
            )
        if prefix == "":
            raise ValueError(
                "For 'load_checkpoint', the value of 'specify_prefix' or 'filter_prefix' can't include ''."
            )
    return prefixes


def check_append_dict(append_dict: object) -> None:
    """Raise MindSpore's TypeError unless these are names and values that can be appended."""
    if append_dict is None:
        return
    if not isinstance(append_dict, Mapping):
        raise TypeError(
            f"For 'save_checkpoint', the argument 'append_dict' must be dict, but got {type(append_dict)}."
        )
    for name, value in append_dict.items():
        if (
            not isinstance(name, str)
            or value is None
            or isinstance(value, (bytes, complex, list, tuple, dict))
        ):
            raise TypeError(
                "For 'save_checkpoint', the type of dict 'append_info' must be key: string, value: int, float, bool or "
                f"Generator, but got key: {type(name)}, value: {type(value)}"
            )


class MoreOptions(NamedTuple):
    """The values of MindSpore's undocumented options of `save_checkpoint`."""

    incremental: object = False
    global_step_num: int | None = None
    remove_redundancy: bool | None = None


def check_more_options(given: Mapping[str, Any], format: str) -> MoreOptions:
    """Return options that came by keyword beside the parameters; MindSpore ignores unknown ones.

    Raises:
        TypeError, ValueError: One has a value that cannot be, or is not for this format.
    """
    options = MoreOptions(**given)
    if options.remove_redundancy is not None:
        check_is_bool("remove_redundancy", options.remove_redundancy)
    check_optional_count(options.global_step_num)
    if format != "ckpt":  # see `check_safetensors_options`
        return options
    if options.incremental:
        raise no_effect(
            "incremental",
            "in save_checkpoint",
            "a file with the changes of map parameters alone cannot be loaded by itself; every file holds all of them",
        )
    if options.remove_redundancy:
        raise no_effect(
            "remove_redundancy", "on a .ckpt, which cannot note it", "pass format='safetensors'"
        )
    return options


def check_safetensors_options(
    format: str, enc_key: bytes | str | None, enc_mode: str, options: MoreOptions
) -> None:
    """Raise MindSpore's ValueError for options that safetensors files do not have."""
    if format != "safetensors":
        return
    start = "For 'save_checkpoint', when format is 'safetensors', the parameter "
    if enc_key is None and enc_mode != "AES-GCM":
        raise ValueError(
            f"{start}'enc_mode' must be set to default value 'AES-GCM', but got '{enc_mode}'."
        )
    if options.incremental is not False:
        raise ValueError(
            f"{start}'map_param_inc' must be set to default value 'False', but got '{options.incremental}'."
        )
    if options.global_step_num is not None:
        raise ValueError(
            f"{start}'global_step_num' must be set to default value 'None', but got '{options.global_step_num}'."
        )


def safetensors_metadata(
    save_obj: object,
    format: str,
    metadata: Mapping[str, str] | None,
    remove_redundancy: object,
) -> dict[str, str] | None:
    """Return the strings that a file gets; those of the user and those of the format.

    Raises:
        TypeError: Something in `metadata` is no string.
        ValueError: The format is `ckpt`, or a string contradicts the content.
    """
    given = checked_strings(metadata)
    if format != "safetensors":
        if metadata is not None:
            raise ValueError(
                "'metadata' is stored in safetensors files alone; pass format='safetensors', or"
                " append_dict for values in a .ckpt"
            )
        return None
    from ckptmgr.formats.safetensors_file import DEFAULT_FORMAT, FORMAT_KEY, MINDSPORE_METADATA

    own = dict(MINDSPORE_METADATA) if is_mindspore(save_obj) else {FORMAT_KEY: DEFAULT_FORMAT}
    if remove_redundancy is not None:
        own[_REDUNDANCY] = str(remove_redundancy)
    for key, text in own.items():
        if given.get(key, text) != text:
            raise ValueError(
                f"'metadata' says {key!r} is {given[key]!r}, but {text!r} is written; leave it out"
            )
    return {**own, **given}


def checked_strings(metadata: object) -> dict[str, str]:
    """Return metadata as a dictionary; raises TypeError unless it maps strings to strings."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise TypeError(f"'metadata' must be a mapping of strings, but got {type(metadata)}")
    for key, text in metadata.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise TypeError(f"'metadata' must map strings to strings, but got {key!r}: {text!r}")
    return dict(metadata)


def warn_of_redundancy(metadata: Mapping[str, str], *, is_expected: bool) -> None:
    """Log MindSpore's warning if a file says that ranks shared its tensors, or not, unlike the caller."""
    noted = metadata.get(_REDUNDANCY)
    if noted not in (None, str(is_expected)):
        kind = "non-deduplicated" if is_expected else "deduplicated"
        _LOG.warning(
            "For 'load_checkpoint', the safetensors file is %s, but remove_redundancy is set to %s.",
            kind,
            is_expected,
        )
