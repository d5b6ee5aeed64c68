"""What the hub, the network or the disk answers, as one typed line that says what to do.

It knows huggingface_hub's exceptions, so that nobody else has to; it asks for nothing itself.
"""

import contextlib
import os
from collections.abc import Iterator
from urllib.parse import urlsplit

from ...errors import HubError, MlxrtError, ModelNotFound


def check_endpoint() -> None:
    address = os.environ.get("HF_ENDPOINT", "https://")
    try:
        split = urlsplit(address)
        usable = split.scheme in ("http", "https") and (split.port is None or split.port > 0)
    except ValueError:
        usable = False
    if not usable or (split.netloc == "" and address != "https://"):
        raise HubError(f"HF_ENDPOINT is {address!r}, expected http(s)://host[:port]; correct it or unset it")


@contextlib.contextmanager
def translated(repo: str, asked: str) -> Iterator[None]:
    """Whatever the network, the hub or the disk says becomes one line of ours."""
    from huggingface_hub import errors

    broken = getattr(errors, "XetDownloadError", errors.HTTPError)  # huggingface_hub 1.x has no such class
    try:
        yield
    except errors.HFValidationError as error:
        raise ModelNotFound(f"{repo!r} cannot be a model on the hub: {first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        raise answered(repo, asked, error, error.response.status_code) from error
    except (errors.LocalEntryNotFoundError, errors.HTTPError, ConnectionError, broken) as error:
        raise HubError(
            f"no connection to the hub for {asked} ({type(error).__name__}: {first_line(error)}); files that are whole "
            "stay: check the network and HF_ENDPOINT and run it again, or use --offline with a model that is cached"
        ) from error
    except OSError as error:
        raise HubError(f"cannot store {asked}: {first_line(error)}; free space or set HF_HOME elsewhere") from error


def answered(repo: str, asked: str, error: Exception, status: int) -> MlxrtError:
    """The error for a status the hub answered with."""
    from huggingface_hub import errors

    token = "give a token that may read it (--token or HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{repo} is gated (status {status}): accept its terms on its page at the hub, then {token}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{repo} has no such revision (asked for {asked}); give a branch, a tag or a commit")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFound(f"the hub lists a file of {asked} that it lacks: {first_line(error)}; run it again")
    if status == 404:
        return ModelNotFound(f"the hub has no model {repo}; check the spelling, or {token} if it is private")
    if status == 401:
        return HubError(f"the hub answered 401 for {repo}: no such model, or a private one; check the name or {token}")
    if status == 403:
        return HubError(f"the hub answered 403 for {repo}: this token may not read it; {token}")
    return HubError(f"the hub answered {status} for {asked}; try again later")


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
