"""Results come back to the host without stopping the device."""

from millstream.results.fetching import Fetched, fetch, fetch_each

__all__ = ["Fetched", "fetch", "fetch_each"]
