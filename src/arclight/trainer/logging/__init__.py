"""Collect, reduce and publish logged values: in come ``self.log`` calls, out go rows and metrics; open ``results`` first."""
