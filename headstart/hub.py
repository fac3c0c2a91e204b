"""Whether the hub answers, asked once by each process: libraries that find out file by file take minutes over it."""

from __future__ import annotations

import functools
import sys

from headstart.errors import warn

ANSWER_SECONDS = 10.0
"""How long the hub may take to say anything at all."""


@functools.cache
def look_for_hub() -> None:
    """Where the hub says nothing, only what is cached on this machine is used from now on, after one warning.

    Any answer will do, a refusal too. Call it before anything is asked of the hub, by whichever library.
    """
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        return
    import httpx2 as httpx
    from huggingface_hub import constants

    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except (httpx.HTTPError, OSError) as error:
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has copied the switch
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        reason = f"{type(error).__name__} within {ANSWER_SECONDS:g} s"
        warn(f"the hub at {constants.ENDPOINT} does not answer ({reason}); only what is cached on this machine is used")
