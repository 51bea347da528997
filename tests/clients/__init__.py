"""Popular client tools, run against a homing cluster; `make clients`."""
