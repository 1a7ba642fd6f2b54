"""Updates of many clients become one mean change: in fixed point, so that the order of their arrival leaves no trace."""
