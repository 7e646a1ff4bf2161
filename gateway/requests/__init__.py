"""A request's body -> what goes to the engine, or an error that names the field. Pure but for random ids."""
