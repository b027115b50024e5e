# SPDX-License-Identifier: Apache-2.0
"""Errors of key services.

```
KeySourceError
└── ProviderError                 the service gave no key, for a reason that is neither of these
    ├── ProviderRefusedError      it answered no: no permission, unknown or disabled key, wrong context, changed blob
    ├── ProviderUnavailableError  it did not answer: not installed, not reachable, overloaded, too slow
    └── ProviderAnswerError       it answered something that is not an answer
```
A service never says whether the context is wrong or the blob was changed, so neither do we.
"""

from __future__ import annotations

from ..errors import KeySourceError


class ProviderError(KeySourceError):
    """Report a key service that gave no key."""


class ProviderRefusedError(ProviderError):
    """Report a key service that said no; asking again changes nothing."""


class ProviderUnavailableError(ProviderError):
    """Report a key service that could not be asked; asking later may work."""


class ProviderAnswerError(ProviderError):
    """Report an answer that does not have the agreed form."""
