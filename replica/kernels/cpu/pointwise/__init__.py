"""The small operations around the products: norm, rotation, activation, row gathering."""
