"""Transports: one file each, implementing roles of ``commbackend.contract``."""

if __name__ != "commbackend.transports":
    raise ImportError(
        "import commbackend.transports: the folder 'transports' at the repository's root is only a link to it"
    )
