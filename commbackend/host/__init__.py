"""What transports share on the host: links between processes, shared memory, control planes, collectives on CPUs."""
