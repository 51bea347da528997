"""The endpoints: `table.py` maps each method and path to its handler; the other modules are the handlers, by purpose.

Imported by `http.app`. A handler is an async function of a `Front` and an `Exchange`; it must reach replicas only
through `router.backend`.
"""
