"""One replica: the engine, its models and the words it exchanges with routers. Importing this face loads no torch."""
