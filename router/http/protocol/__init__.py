"""HTTP/1.1 itself: connections, requests and responses, access log, CORS. Knows no model and no endpoint."""
