"""Results come back to the host without stopping the device."""

from millstream.results.fetching import fetch, fetch_each
from millstream.results.result import Fetched

__all__ = ["Fetched", "fetch", "fetch_each"]
