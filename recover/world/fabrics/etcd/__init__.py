"""The fabric on etcd, and all that speaks to one: client, server, watch, leases of hosts."""
