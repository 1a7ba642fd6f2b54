"""An arclight federation of clients that know only Flower."""
