"""Completions over gRPC, through Ray Serve's `grpc_options`."""
