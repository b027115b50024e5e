# SPDX-License-Identifier: Apache-2.0
"""Checks of `CheckpointConfig`: MindSpore's exception types and messages, and own ones.

Source: `mindspore/train/callback/_checkpoint.py` and `mindspore/_checkparam.py`, 2.10.0 (the
wording).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

from ckptmgr.core.arguments import check_is_bool, check_type
from ckptmgr.core.errors import KeyProblem
from ckptmgr.crypto.errors import CryptoError

if TYPE_CHECKING:  # signatures are rare, and their library is slow to import
    from ckptmgr.crypto.keys.signing import SigningKey


KEY_LENGTHS_BYTES: Mapping[str, tuple[int, ...]] = {
    "AES-GCM": (16, 24, 32),
    "AES-CBC": (16, 24, 32),
    "SM4-CBC": (16,),
}
CONTAINER_KEY_LENGTHS_BYTES: Mapping[str, tuple[int, ...]] = dict.fromkeys(
    (*KEY_LENGTHS_BYTES, "SM4-GCM"), (16, 24, 32)
)
"""Cipher mode of a container to its key lengths."""

_DECIMAL_MODES = ("400", "440", "444", "600", "640", "644", "660", "664")
MAX_ZSTD_LEVEL = 19
_DEFAULT_LEVEL = 1

_COUNTERS = ("epoch_num", "step_num")
_INT64_BITS = 63
_MINDSPORE_VALUES = frozenset({"Parameter", "Tensor", "Generator"})
_logger = logging.getLogger(__name__)


def check_optional_count(value: object) -> int | None:
    """Return a number of steps, seconds, files or minutes; None passes."""
    if value is None:
        return None
    if not isinstance(value, int):
        raise TypeError(f"The input value must be int, but got '{type(value).__name__}'")
    if isinstance(value, bool):
        raise TypeError(_out_of_range(value))
    if value < 0 or value.bit_length() > _INT64_BITS:
        raise ValueError(_out_of_range(value))
    return value


def check_any_set(*counts: int | None) -> None:
    """Raise when all of these settings are None or 0."""
    if not any(counts):
        raise ValueError(
            "For 'CheckpointConfig', the input arguments 'save_checkpoint_steps', 'save_checkpoint_seconds', "
            "'keep_checkpoint_max' and 'keep_checkpoint_per_n_minutes' can't be all None or 0."
        )


def check_bool(value: object) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"The input value must be a bool, but got {type(value).__name__}.")
    return value


def check_file_mode(value: object) -> int:
    """Return the permission bits of data files.

    Raises:
        TypeError: It is no integer.
        ValueError: It has other bits than r and w, lets others write, not the owner read, or grants
            a class more than the one before it; distinguishes `640` from `0o640`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"file_mode must be an int such as 0o640, but got {value!r}")
    owner, group, others = (value >> bits & 0o7 for bits in (6, 3, 0))
    if value < 0 or value & ~0o666:
        problem = "has other bits than r and w; directories get x where there is r"
    elif others & 0o2:
        problem = "lets every user of the machine write"
    elif not owner & 0o4:
        problem = "does not let its owner read"
    elif group & ~owner or others & ~group:
        problem = "grants the group more than the owner, or others more than the group"
    elif group == 0o2:
        problem = "lets the group write, but not read"
    else:
        return value
    text = str(value)
    is_decimal = text in _DECIMAL_MODES
    hint = f"; write 0o{text}" if is_decimal else "; usual are 0o400, 0o440, 0o640 and 0o660"
    raise ValueError(f"file_mode {value:#o} {problem}{hint}")


def check_async_save(value: object) -> bool | str:
    """Return how a save runs in the background."""
    if not isinstance(value, bool | str):
        raise TypeError(
            f"For 'save_checkpoint', the parameter 'async_save' must be bool or str, but got {type(value)}."
        )
    if isinstance(value, str) and value not in ("process", "thread"):
        raise ValueError(
            f"For 'save_checkpoint', the argument 'async_save' can only be 'process' or 'thread',but got {value}."
        )
    return value


def check_network(network: object) -> object:
    """Return None, an object with parameters, or a mapping of names to arrays."""
    if network is None or _has_parameters(network):
        return network
    raise TypeError(
        f"For 'CheckpointConfig', the type of 'saved_network' must be None or Cell, but got {type(network)}."
    )


def check_append_info(info: object) -> dict[str, object] | None:
    """Return the values to append, counters with their start values; None for nothing."""
    if info is None or info == []:
        return None
    if not isinstance(info, list):
        raise TypeError(
            f"For 'CheckpointConfig', the type of 'append_info' must be list,but got {type(info)}."
        )
    values: dict[str, object] = {name: 0 for name in _COUNTERS if name in info}
    has_dict = False
    for element in info:
        if not isinstance(element, str | dict):
            raise TypeError(
                "For 'CheckpointConfig', the type of 'append_info' element must be str or dict,"
                f"but got {type(element)}."
            )
        if isinstance(element, str):
            _check_counter_name(element)
            continue
        if has_dict:
            # The braces are MindSpore's: its message lacks the f of an f-string.
            raise TypeError(
                "For 'CheckpointConfig', the element of 'append_info' must has only one dict, but got {dict_num}"
            )
        has_dict = True
        values |= _check_append_dict(element)
    return values


def check_raw_key(name: str, key: object) -> bytes | None:
    """Return a key or None; the message never shows the value."""
    if key is not None and not isinstance(key, bytes):
        error = ValueError(
            f"The parameter '{name}' must be isinstance of (<class 'NoneType'>, <class 'bytes'>), "
            f"but got <redacted {type(key).__name__}>."
        )
        if isinstance(key, str):
            error.add_note(
                f"hint: a text names a source, as in {name}='file:run.key' or 'env:RUN_KEY'; a key"
                " in hexadecimal is bytes.fromhex(...)"
            )
        raise error
    return key


def check_cipher_mode(name: str, mode: object) -> str:
    """Return the name of a cipher mode; whether it is known is checked only together with a key."""
    return check_type(name, mode, str)


def check_signing_key(key: object) -> SigningKey | None:
    """Return the key of a source, or None; the message never shows the value."""
    if key is None:
        return None
    from ckptmgr.crypto.keys.signing import SigningKey, load_signing_key

    if isinstance(key, SigningKey):
        return key
    if not isinstance(key, str):
        raise TypeError(
            f"'signing_key' must be the source of a key, such as 'file:sign.pem', but got <redacted {type(key).__name__}>"
        )
    try:
        return load_signing_key(key)
    except CryptoError as error:
        raise KeyProblem(error.message, hint=error.hint) from error


def check_manifest(manifest: object, **in_it: object) -> bool:
    """Return whether a manifest is wanted; without one, nothing that goes into it may be given.

    Raises:
        ValueError: Something of it is given (is not None), or `manifest` is no bool.
    """
    if check_is_bool("manifest", manifest):
        return True
    for name, value in in_it.items():
        if value is not None:
            raise ValueError(
                f"{name} goes into the manifest, so it has no effect with manifest=False; leave one of them out"
            )
    return False


def check_crc(crc_check: bool | None, *, has_manifest: bool, is_checked: bool) -> bool:
    """Return whether a file gets a CRC32; by default where nothing else would show its damage.

    `is_checked` if the file is encrypted or compressed, which both check its content.
    """
    if crc_check is None:
        return not has_manifest and not is_checked
    return check_is_bool("crc_check", crc_check)


def check_cipher(key: bytes | None, mode: str, *, format: str = "ckpt") -> None:
    """Raise KeyProblem when the cipher mode is unknown or does not take a key of this length.

    A container (encrypted safetensors) has one mode more and takes any key in every mode.
    """
    if key is None:
        return
    known = CONTAINER_KEY_LENGTHS_BYTES if format == "safetensors" else KEY_LENGTHS_BYTES
    lengths = known.get(mode)
    if lengths is None:
        raise KeyProblem(
            f"the cipher mode must be one of {', '.join(known)}, but got {mode}",
            hint=_did_you_mean(mode.upper(), known),
        )
    if len(key) not in lengths:
        wanted = " or ".join(map(str, lengths))
        raise KeyProblem(f"a key for {mode} must be {wanted} bytes long, but got {len(key)}")


def check_compression(method: object, level: object, *, format: str) -> int | None:
    """Return the zstd level of compressed files, or None without compression."""
    if method is None:
        if level != _DEFAULT_LEVEL:
            raise ValueError(f"compression_level={level!r} needs compression='zstd'")
        return None
    if method != "zstd":
        raise ValueError(f"compression must be None or 'zstd', but got {method!r}")
    if format != "safetensors":
        raise ValueError(
            "compression needs format='safetensors': a .ckpt is for MindSpore, which would not read it"
        )
    if not isinstance(level, int) or isinstance(level, bool) or not 1 <= level <= MAX_ZSTD_LEVEL:
        raise ValueError(
            f"compression_level must be 1 (fast) to {MAX_ZSTD_LEVEL}, but got {level!r}"
        )
    return level


def check_options(
    owner: str, names: Iterable[str], *, options: Iterable[str], parameters: Iterable[str]
) -> None:
    """Raise TypeError for a name that `owner` does not have; its value, perhaps a key, is not shown."""
    known = [*options, *parameters]
    for name in names:
        if name not in known:
            hint = _did_you_mean(name, known)
            raise TypeError(f"{owner} has no option {name!r}" + (f"; {hint}" if hint else ""))


def warn_of_masked(
    masked: Mapping[str, object], in_force: Mapping[str, object], *, way_out: str
) -> None:
    """Log a warning if a setting was given that another one replaces, as in MindSpore.

    Each is a name and its value; the first of `in_force` that is neither None nor 0 counts.
    """
    given = [f"{name}={value}" for name, value in masked.items() if value]
    replacing = [f"{name}={value}" for name, value in in_force.items() if value]
    if given and replacing:
        _logger.warning(
            "%s has no effect: %s is in force; %s", " ".join(given), replacing[0], way_out
        )


def _out_of_range(value: int) -> str:
    # Python refuses to print an int of more than 4300 digits.
    is_huge = value.bit_length() > _INT64_BITS
    shown = f"a number of {value.bit_length()} bits" if is_huge else str(value)
    return f"The input value must be int and must >= 0, but got '{shown}' with type '{type(value).__name__}'."


def _has_parameters(network: object) -> bool:
    if isinstance(network, Mapping):
        return all(
            isinstance(name, str) and hasattr(array, "shape") and hasattr(array, "dtype")
            for name, array in network.items()
        )
    methods = ("state_dict", "parameters_dict", "get_parameters")
    return not isinstance(network, type) and any(
        callable(getattr(network, method, None)) for method in methods
    )


def _check_counter_name(name: str) -> None:
    if name not in _COUNTERS:
        raise ValueError(
            "For 'CheckpointConfig', the value of element in the argument 'append_info' must be in "
            f"{list(_COUNTERS)}, but got {name}."
        )


def _check_append_dict(given: dict[object, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _is_appendable(value):
            raise TypeError(
                "For 'CheckpointConfig', the key type of the dict 'append_info' must be string, the value type must "
                f"be int or float or bool, but got key type {type(name)}, value type {type(value)}"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(
                f"For 'CheckpointConfig', the value of '{name}' in 'append_info' does not fit in 64 bits."
            )
        if name in _COUNTERS and not isinstance(value, int | float):
            raise TypeError(
                f"For 'CheckpointConfig', the value of '{name}' in 'append_info' is what counting starts "
                f"from, it must be int or float, but got {type(value)}."
            )
        values[name] = value
    return values


def _is_appendable(value: object) -> bool:
    if isinstance(value, int | float | str):
        return True
    return any(
        base.__name__ in _MINDSPORE_VALUES and base.__module__.partition(".")[0] == "mindspore"
        for base in type(value).__mro__
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    import difflib  # for errors only

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else None


Framework = Literal["np", "pt", "jax"]


def check_framework(framework: object) -> None:
    """Raise ValueError unless it is a framework whose tensors a load can return."""
    if framework not in get_args(Framework):
        raise ValueError(f"framework must be 'np', 'pt' or 'jax', but got {framework!r}")
