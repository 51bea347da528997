"""Ray places, starts, heals; settings and the command line. The only room that imports ray."""
