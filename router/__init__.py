"""The router: prefix index, decision, flow of requests, and the HTTP front."""
