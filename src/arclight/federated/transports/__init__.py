"""How messages and blobs get from nodes to the server: within a process, over HTTPS, under Flower."""
