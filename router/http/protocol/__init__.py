"""HTTP/1.1: connections, requests and responses, access log, CORS. Imported by `http`; must not depend on endpoints."""
