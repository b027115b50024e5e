# SPDX-License-Identifier: Apache-2.0
"""Ranks of gloo that are forked from one process, which hosts their store as `torchrun` does.

The import of torch takes longer than all that a rank of a test does; forked ranks share one.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable


def run_ranks(world: int, main: Callable[[], None]) -> None:
    """Run `main` as each of the ranks and wait for them.

    Raises:
        ChildProcessError: A rank failed.
    """
    # Imports of the first step of an optimizer and of a sharded model, once for all ranks.
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ckptmgr.integrations import torch_store

    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ranks = []
    for rank in range(world):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                listener.close()
                torch_store._made.clear()  # of other tests of this process: a rank begins anew
                os.environ |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
                main()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
    # After the forks, for the store has threads.
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    del store
    if any(codes):
        raise ChildProcessError(f"the ranks ended with {codes}")
