"""What the ``commbackend`` command runs beside ``demo``, ``bench`` and ``tune``."""
